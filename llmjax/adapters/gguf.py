"""GGUF adapters: llama.cpp's names of tensors, scale and layout. Format: llama.cpp's ``src/llama-adapter.cpp``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from llmjax.adapters.adapter import Floats
from llmjax.adapters.product import Factors, Product
from llmjax.checkpoint.checkpoint import Checkpoint
from llmjax.checkpoint.experts import with_stacked_experts
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.model import hf_tensors
from llmjax.checkpoint.gguf.tensor import GGUFTensor
from llmjax.checkpoint.stored_tensor import StoredStack, StoredTensor
from llmjax.errors import CheckpointError

A, B = ".lora_a", ".lora_b"
EMBEDDING = "token_embd.weight"
ARCHITECTURE = "general.architecture"


def read_gguf(path: Path, base: Checkpoint) -> dict[str, StoredTensor]:
    """Reads an adapter for a base, which may be a folder or a GGUF file.

    Returns:
        Products by the model's names of parameters: rows and columns are in the model's order, not in the file's.

    Raises:
        CheckpointError: the file is malformed, is not such an adapter, or is for another architecture.
    """
    file = GGUFFile.open(path)
    _check(file, "general.type", "adapter")
    _check(file, "adapter.type", "lora")
    if base.gguf is not None:
        _check(file, ARCHITECTURE, base.gguf.metadata.get(ARCHITECTURE))
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise CheckpointError(f"{path}: the adapter acts only after certain tokens (aLoRA), which is not supported")
    products = _products(file)
    whole: dict[str, Any] = {} if base.gguf is None else dict(base.gguf.tensors)
    as_file = replace(base.gguf or file, path=path, tensors=MappingProxyType(whole | products))
    converted = hf_tensors(as_file, base.config if base.gguf is not None else _with_heads(base.config))
    own = {name: one for name, one in converted.items() if isinstance(cast(Any, one.source), Product)}
    return with_stacked_experts(cast(dict[str, StoredStack], own), path)


def _with_heads(config: dict[str, Any]) -> dict[str, Any]:
    """A folder's configuration with the keys about heads that it may leave to their defaults."""
    heads, size = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(size, int):
        return config
    return {"num_key_value_heads": heads, "head_dim": size // heads, **config}


def _check(file: GGUFFile, key: str, expected: Any) -> None:
    if (value := file.metadata.get(key)) != expected:
        raise CheckpointError(f"{file.path}: {key} is {value!r}, not {expected!r}")


def _products(file: GGUFFile) -> dict[str, Product]:
    """The products by names of the base's tensors."""
    tensors, found = dict(file.tensors), dict[str, Product]()
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise CheckpointError(f"{file.path}: adapter.lora.alpha is {alpha!r}, not a number")
    for name in file.tensors:
        if not name.endswith(A):
            continue
        stem = name.removesuffix(A)
        if (second := tensors.pop(stem + B, None)) is None:
            raise CheckpointError(f"{file.path}: tensor {stem + B!r} is missing, but {name!r} is there")
        a, b = _read(tensors.pop(name)), _read(second)
        if stem == EMBEDDING:  # the transposed factors, for its rows are looked up
            a, b = b.T, a
        if a.ndim != b.ndim or a.ndim not in (2, 3) or a.shape[-2] != b.shape[-1] or a.shape[:-2] != b.shape[:-2]:
            raise CheckpointError(
                f"{file.path}: tensors {name!r} of shape {list(a.shape)} and {second.name!r} of {list(b.shape)} are "
                "not factors of a matrix"
            )
        scale = np.float32(alpha / b.shape[-1] if alpha else 1)
        factors = Factors(a=np.ascontiguousarray(a), b=np.ascontiguousarray(b) * scale)
        found[stem] = Product.of(stem, factors, file.path)
    if tensors:
        raise CheckpointError(
            f"{file.path}: tensor {next(iter(tensors))!r} is not understood: it is neither of {A} nor of {B}"
        )
    return found


def _read(tensor: GGUFTensor) -> Floats:
    values = tensor.read(np.dtype(np.float32))
    if not np.isfinite(values).all():
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} holds what is not a finite number")
    return values
