"""Adapters (LoRA): what requests call them, and their files."""
