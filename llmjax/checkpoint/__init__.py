"""Model files: from a path to a config and tensors under Hugging Face names."""

from llmjax.checkpoint.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from llmjax.checkpoint.gguf import GGUFFile, GGUFTensor

__all__ = ["Checkpoint", "GGUFFile", "GGUFTensor", "StoredTensor", "open_checkpoint"]
