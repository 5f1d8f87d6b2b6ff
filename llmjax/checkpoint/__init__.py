"""Model files: opens a path as a config and tensors under Hugging Face names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmjax.checkpoint.checkpoint import Checkpoint, open_checkpoint
    from llmjax.checkpoint.gguf.file import GGUFFile, GGUFTensor
    from llmjax.checkpoint.stored_tensor import StoredTensor

__all__ = ["Checkpoint", "GGUFFile", "GGUFTensor", "StoredTensor", "open_checkpoint"]

# These are loaded when first used: reading a tokenizer from a file, or locating the file, needs no JAX.
_MODULES = {
    "Checkpoint": "llmjax.checkpoint.checkpoint",
    "GGUFFile": "llmjax.checkpoint.gguf.file",
    "GGUFTensor": "llmjax.checkpoint.gguf.file",
    "StoredTensor": "llmjax.checkpoint.stored_tensor",
    "open_checkpoint": "llmjax.checkpoint.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
