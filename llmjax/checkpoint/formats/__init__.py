"""Formats of quantized safetensors checkpoints."""
