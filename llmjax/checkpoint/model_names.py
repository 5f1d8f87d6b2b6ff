"""Renames the tensors of a checkpoint to the model's names if its family has others, and splits fused ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmjax.checkpoint.rows import RowsOf
from llmjax.checkpoint.safetensors import SafetensorsTensor
from llmjax.checkpoint.stored_tensor import Derived, StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models import Attention, ModelConfig
from llmjax.models.names import QKV, Names

T = TypeVar("T")

HEADS = {
    "score.weight": "head.0.dense.weight",
    "v_head.weight": "head.0.dense.weight",
    **{
        f"score.{place}.{part}": f"head.{number}.dense.{part}"
        for number, place in enumerate((0, 2))  # what stands between two is not a matrix
        for part in ("weight", "bias")
    },
}
"""Names in decoders' files of the matrices after pooling."""
FUSED = re.compile(
    r"(?P<layer>model\.layers\.(?P<index>\d+))\.(?P<module>self_attn\.qkv_proj|mlp\.(?:\w+\.)?(?:gate_up|up_gate)_proj)"
)


class VectorStack(Derived):
    """Vectors of one size, stacked: [n, size]."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.sources), *self.sources[0].shape)

    def read(self, dtype: np.dtype) -> np.ndarray:
        return np.stack([vector.read(dtype) for vector in self.sources])


class UnitRows(Derived):
    """A matrix, which is dequantized, with its rows divided by their lengths."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sources[0].shape

    def read(self, dtype: np.dtype) -> np.ndarray:
        values = self.sources[0].read(np.dtype(np.float32))
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        return (values / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(dtype)


def with_pooler_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors of a decoder that makes vectors: those of one without a head lack the prefix that others have, and the
    matrices of labels or rewards are called ``score`` or ``v_head``."""
    bare = any(name.startswith("layers.") for name in tensors)
    return {HEADS.get(name) or (f"model.{name}" if bare else name): tensor for name, tensor in tensors.items()}


def with_model_names(
    tensors: Mapping[str, StoredTensor], names: Names, model: ModelConfig, path: Path
) -> dict[str, StoredTensor]:
    """Tensors by the names that the model has for them; others keep theirs.

    Args:
        tensors: tensors by the names in the files.
        names: names of the family.
        model: the model, which determines the sizes of the parts of fused tensors.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: a fused tensor has another size, a vector of a stack is missing, or two tensors have one name.
    """
    found: dict[str, StoredTensor] = {}
    stacks: dict[str, dict[int, StoredTensor]] = {}
    for stored_name, tensor in tensors.items():
        module, _, suffix = stored_name.rpartition(".")
        if (
            isinstance(tensor, SafetensorsTensor)
            and len(tensor.shape) == 2
            and module.endswith(tuple(names.transposed))
        ):
            tensor = tensor.transposed()
        if isinstance(tensor, SafetensorsTensor) and len(tensor.shape) == 2 and suffix in names.vectors:
            tensor = tensor.flat()
        module, number = names.in_model(module)
        if number is not None:
            stacks.setdefault(f"{module}.{suffix}", {})[number] = tensor
            continue
        for name, part in _parts(module, suffix, tensor, names, model, path):
            if name in found:
                raise CheckpointError(f"{path}: tensor {name!r} is there twice, once as {stored_name!r}")
            found[name] = part
    for name, vectors in stacks.items():
        if missing := set(range(max(vectors) + 1)) - set(vectors):
            raise CheckpointError(f"{path}: {name!r} is a stack of vectors, of which number {min(missing)} is missing")
        if len({vector.shape for vector in vectors.values()}) > 1:
            raise CheckpointError(f"{path}: {name!r} is a stack of vectors, which differ in size")
        found[name] = VectorStack(name, tuple(vectors[number] for number in sorted(vectors)))
    return found


def _parts(
    module: str, suffix: str, tensor: StoredTensor, names: Names, model: ModelConfig, path: Path
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of the model that a file's tensor is, one unless it is fused."""
    fused = FUSED.fullmatch(module)
    if fused is None or int(fused["index"]) >= model.num_layers or not tensor.shape:
        yield f"{module}.{suffix}", tensor
        return
    mixer = model.layers[int(fused["index"])].mixer
    rows = tensor.shape[0]
    part_of, _, joined = fused["module"].rpartition(".")
    if joined != "qkv_proj":
        half = rows // 2
        if rows % 2:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} has {rows} rows, not an even number for gate and up")
        first, second = ("up", "gate") if joined == "up_gate_proj" else ("gate", "up")
        parts = {f"{part_of}.{first}_proj": np.arange(half), f"{part_of}.{second}_proj": np.arange(half, rows)}
    else:
        assert isinstance(mixer, Attention)
        wanted = (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
        if rows != wanted:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has {rows} rows, not {wanted} for queries, keys and values"
            )
        parts = {f"self_attn.{part}_proj": chosen for part, chosen in _qkv_rows(mixer, names.qkv).items()}
    for part, chosen in parts.items():
        name = f"{fused['layer']}.{part}.{suffix}"
        yield name, RowsOf(name, (tensor,), chosen)


def _qkv_rows(attention: Attention, order: QKV) -> dict[str, np.ndarray]:
    """The rows of queries, keys and values in a fused matrix."""
    heads, kv_heads, size = attention.heads, attention.kv_heads, attention.head_dim
    rows = np.arange((heads + 2 * kv_heads) * size)
    if order is QKV.BY_GROUP:
        grouped = rows.reshape(kv_heads, heads // kv_heads + 2, size)
        return {"q": grouped[:, :-2].reshape(-1), "k": grouped[:, -2].reshape(-1), "v": grouped[:, -1].reshape(-1)}
    q, k, v = np.split(rows, [heads * size, (heads + kv_heads) * size])
    return {"q": q, "k": k, "v": v}
