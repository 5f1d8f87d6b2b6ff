"""Ollama's API on top of the chat and of completions: requests in, lines out."""
