"""GGUF files: the container, read and written, and models in it under Hugging Face names."""
