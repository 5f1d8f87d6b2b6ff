"""Anthropic's Messages on top of the chat: blocks in and out."""
