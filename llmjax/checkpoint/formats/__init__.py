"""Formats of quantised safetensors checkpoints."""
