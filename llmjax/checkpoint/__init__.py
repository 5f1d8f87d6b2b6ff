"""Model files: from a path to a config and tensors under Hugging Face names."""

from llmjax.checkpoint.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.gguf.file import GGUFFile, GGUFTensor
from llmjax.checkpoint.stored_tensor import StoredTensor

__all__ = ["Checkpoint", "GGUFFile", "GGUFTensor", "StoredTensor", "open_checkpoint"]
