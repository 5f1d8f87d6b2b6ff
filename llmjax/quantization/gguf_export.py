"""Writes a checkpoint as one GGUF file, quantizing it on the way: the inverse of `gguf.model`.

For a source in Hugging Face's layout, metadata comes from config.json, and tensors get the converter's changes (names,
interleaved query and key rows, norms plus one). For a GGUF source, metadata is copied value by value, and tensors stay
as stored unless they are quantized again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.checkpoint import Checkpoint
from llmjax.checkpoint.experts import ExpertStack
from llmjax.checkpoint.gguf.architectures import ARCHITECTURES
from llmjax.checkpoint.gguf.file import GGUFTensor, stored_metadata
from llmjax.checkpoint.gguf.metadata import (
    architecture_metadata,
    architecture_name,
    attentions,
    rope_tensors,
    token_metadata,
)
from llmjax.checkpoint.gguf.names import END_KEYS, FILE_TYPES, SHARED_GATE, gguf_names, hf_name
from llmjax.checkpoint.gguf.writer import TensorInfo, open_gguf_writer
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models import ModelConfig, abstract_model
from llmjax.quantization.mixes import KEEP, NEVER, Choice, ModelShape, mix_named, tensor_scheme
from llmjax.quantization.report import Difference
from llmjax.quantization.schemes import SchemeRules
from llmjax.weights.ggml.reference import QUANTIZERS, quantize
from llmjax.weights.ggml.types import BlockType, dequantize
from llmjax.weights.rows import FLOATS

FILE_TYPE_NUMBERS: Mapping[str, int] = MappingProxyType({name.lower(): n for n, name in FILE_TYPES.items()})
PURE_FILE_TYPES = MappingProxyType({"q3_k": "q3_k_s", "q4_k": "q4_k_s", "q5_k": "q5_k_s", "mxfp4": "mxfp4_moe"})
"""File types of files whose matrices all have one scheme, where they differ from the scheme's name."""

QUANTIZATION_VERSION = 2
DIFFERENCE_BLOCK = 1 << 20  # weights compared at a time


@dataclass(frozen=True)
class Exported:
    """The result of exporting a tensor.

    Attributes:
        name: name in the file.
        hf_name: Hugging Face's name, which rules match.
        source_type: type in the source.
        source_nbytes: bytes in the source.
        info: shape and type in the file.
        choice: the choice of the mix; None for plain types and tensors that are never quantized.
        difference: difference from the source's weights if they were quantized again; None: they were not, or not yet.
    """

    name: str
    hf_name: str
    source_type: str
    source_nbytes: int
    info: TensorInfo
    choice: Choice | None
    difference: Difference | None = None


@dataclass(frozen=True)
class Report:
    """A report on the file that was written.

    Attributes:
        tensors: in file order.
        notes: a line for each thing that the file lacks.
    """

    tensors: tuple[Exported, ...]
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, eq=False)
class _Item:
    """A tensor to be written: announced as `exported`, with rows reordered and shifted as the format requires."""

    exported: Exported
    source: StoredTensor | GGUFTensor
    interleaved_heads: int = 0
    offset: float = 0.0

    def chunks(self) -> Iterator[tuple[np.ndarray, Difference | None]]:
        """The stored data, experts one by one, with the difference from the source if it was quantized here."""
        info = self.exported.info
        if isinstance(self.source, GGUFTensor) and self.source.type_name == info.type_name:
            yield self.source.raw, None
            return
        for matrix in self._matrices():
            yield self._stored(matrix)

    def _matrices(self) -> Iterable[StoredTensor | GGUFTensor]:
        if isinstance(self.source, ExpertStack):
            return self.source.sources
        if isinstance(self.source, GGUFTensor) and len(self.source.shape) == 3:
            return map(self.source.row_slice, range(self.source.shape[0]), range(1, self.source.shape[0] + 1))
        return (self.source,)

    def _stored(self, source: StoredTensor | GGUFTensor) -> tuple[np.ndarray, Difference | None]:
        type_name = self.exported.info.type_name.lower()
        kept = FLOATS.get(source.type_name.lower(), FLOATS["f32"])
        values = source.read(FLOATS["f32"] if self.offset else kept)
        if self.offset:
            values = values + np.float32(self.offset)
        if self.interleaved_heads:  # row (head, i, half) from row (head, half, i)
            order = np.arange(len(values)).reshape(self.interleaved_heads, 2, -1).swapaxes(1, 2).reshape(-1)
            values = values[order]
        if type_name in FLOATS:
            return values.astype(FLOATS[type_name], copy=False), None
        rows = values.reshape(-1, values.shape[-1])
        stored = quantize(rows, type_name)
        return stored, _difference(stored, rows, QUANTIZERS[type_name].block)


def export_gguf(
    checkpoint: Checkpoint,
    path: str | Path,
    *,
    scheme: str,
    rules: Mapping[str, str] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    progress: Callable[[Exported], None] = lambda exported: None,
) -> Report:
    """Writes a checkpoint as GGUF, with one tensor in memory at a time.

    Args:
        checkpoint: a checkpoint of a supported family.
        path: the file to write; it appears when it is complete.
        scheme: a key of FLOATS (nothing is quantized), a mix of llama.cpp (`mixes.MIXES`) or one scheme for every
            matrix.
        rules: regular expressions on Hugging Face names with schemes or ``none``, which precede the mix's own rules;
            the first match decides.
        tokenizer: ``tokenizer.*`` keys (`llmjax.tokenizer.gguf_export.tokenizer_metadata`); None: the keys of a GGUF
            source, else none.
        progress: called after each tensor.

    Returns:
        The types of all tensors, and notes on what the file cannot hold.

    Raises:
        ConfigError: a scheme is unknown or a rule malformed.
        CheckpointError: the model or a tensor cannot be written.
    """
    if scheme.lower() not in FLOATS:
        mix_named(scheme)
    parsed = SchemeRules.parse(rules or {}, (*QUANTIZERS, KEEP))
    model = checkpoint.model_config()
    plan = _gguf_items if checkpoint.gguf is not None else _hf_items
    items = list(plan(checkpoint, model, _Typing(scheme.lower(), ModelShape.of(model), parsed)))
    notes = _notes(checkpoint, model)
    ropes = {} if checkpoint.gguf is not None else rope_tensors(checkpoint.config, model)
    infos = [TensorInfo(name, values.shape, "F32") for name, values in ropes.items()]
    metadata = _metadata(checkpoint, model, scheme.lower()) | dict(tokenizer or {})
    written: list[Exported] = []
    with open_gguf_writer(path, metadata, [*infos, *(item.exported.info for item in items)]) as writer:
        for name, values in ropes.items():
            writer.write(name, [values])
        for item in items:
            differences: list[Difference | None] = []
            try:
                writer.write(item.exported.name, _noting(item.chunks(), differences))
            except CheckpointError as error:
                raise CheckpointError(f"{checkpoint.path}: tensor {item.exported.hf_name!r}: {error}") from None
            found = [difference for difference in differences if difference is not None]
            written.append(replace(item.exported, difference=sum(found, Difference()) if found else None))
            progress(written[-1])
    return Report(tuple(written), tuple(notes))


def _noting(
    chunks: Iterator[tuple[np.ndarray, Difference | None]], differences: list[Difference | None]
) -> Iterator[np.ndarray]:
    for data, difference in chunks:
        differences.append(difference)
        yield data


def _difference(stored: np.ndarray, rows: np.ndarray, block: BlockType) -> Difference:
    step = max(1, DIFFERENCE_BLOCK // rows.shape[1])
    starts = range(0, len(rows), step)
    parts = (
        Difference.between(dequantize(stored[i : i + step], block, FLOATS["f32"]), rows[i : i + step]) for i in starts
    )
    return sum(parts, Difference())


@dataclass(frozen=True)
class _Typing:
    """Decides on the type of each tensor."""

    scheme: str
    shape: ModelShape
    rules: SchemeRules

    def exported(self, name: str, hf_name: str, tensor: StoredTensor | GGUFTensor) -> Exported:
        source_type, shape = tensor.type_name, tensor.shape
        choice = None
        if f".{SHARED_GATE}." in name:
            shape = shape[-1:]
        if len(shape) < 2 or not hf_name.endswith("weight") or NEVER.search(hf_name):
            type_name = "f32"
        elif self.scheme in FLOATS:
            type_name = self.scheme
        else:
            rule = self.rules.find(hf_name)
            choice = tensor_scheme(self.scheme, name=hf_name, shape=shape, model=self.shape, rule=rule)
            kept = source_type.lower()
            # A matrix that is not quantized keeps its type if GGUF has it.
            type_name = choice.scheme or (kept if kept in FLOATS or kept in QUANTIZERS else "f32")
        info = TensorInfo(name, tuple(shape), type_name.upper())
        return Exported(name, hf_name, source_type, tensor.nbytes, info, choice)


def _gguf_items(checkpoint: Checkpoint, model: ModelConfig, typing: _Typing) -> Iterator[_Item]:
    assert checkpoint.gguf is not None
    modules = ARCHITECTURES[checkpoint.gguf.metadata["general.architecture"]].layer_tensors
    for tensor in checkpoint.gguf.tensors.values():
        yield _Item(typing.exported(tensor.name, hf_name(tensor.name, modules), tensor), tensor)


def _hf_items(checkpoint: Checkpoint, model: ModelConfig, typing: _Typing) -> Iterator[_Item]:
    """The tensors that the model uses, embedding first, then layer by layer."""
    architecture = ARCHITECTURES[architecture_name(model, checkpoint.path)]
    attention = attentions(model)[0]
    heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads} if architecture.permuted_qk else {}
    _, parameters = abstract_model(model, dtype=FLOATS["f32"], activation_dtype=FLOATS["f32"])
    for name, original in gguf_names(architecture.layer_tensors, layers=model.num_layers).items():
        if original not in parameters:
            continue
        if (tensor := checkpoint.tensors.get(original)) is None:
            raise CheckpointError(f"{checkpoint.path}: tensor {original!r} is missing")
        stem = name.split(".")[-2]
        rows = heads.get(stem, 0)
        if rows and tensor.shape[0] % (2 * rows):
            raise CheckpointError(f"{checkpoint.path}: tensor {original!r} has {tensor.shape[0]} rows for {rows} heads")
        offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
        yield _Item(typing.exported(name, original, tensor), tensor, interleaved_heads=rows, offset=offset)


def _metadata(checkpoint: Checkpoint, model: ModelConfig, scheme: str) -> dict[str, Any]:
    if checkpoint.gguf is not None:
        stored = stored_metadata(checkpoint.gguf.path)
        found = {key: value for key, value in stored.items() if not key.startswith("split.")}
    else:
        found = {
            "general.architecture": architecture_name(model, checkpoint.path),
            "general.type": "model",
            "general.name": checkpoint.path.resolve().name,
            **architecture_metadata(checkpoint.config, model, checkpoint.path),
            **token_metadata(model, checkpoint.generation_config),
        }
    name = scheme if scheme in FILE_TYPE_NUMBERS else mix_named(scheme).base
    return found | {
        "general.quantization_version": np.uint32(QUANTIZATION_VERSION),
        "general.file_type": np.uint32(FILE_TYPE_NUMBERS[PURE_FILE_TYPES.get(name, name)]),
    }


def _notes(checkpoint: Checkpoint, model: ModelConfig) -> list[str]:
    notes = []
    if checkpoint.gguf is None:
        if len(model.eos_token_ids) > len(END_KEYS):
            rest = list(model.eos_token_ids[len(END_KEYS) :])
            notes.append(f"GGUF names {len(END_KEYS)} tokens that end a text; {rest} of config.json are left out")
        used = {"lm_head.weight"} if not model.tie_word_embeddings else set()
        unused = [n for n in checkpoint.tensors if not n.startswith("model.") and n not in used]
        if unused:
            notes.append(f"tensors without a place in GGUF are left out: {', '.join(sorted(unused)[:5])}")
    return notes
