"""A GGUF file seen as a Hugging Face checkpoint: its config.json, and its tensors under their original names.

The converter renames tensors, permutes query and key rows of Llama-likes, adds one to Gemma's norm weights and
keeps long-context frequencies in tensors; all of it is undone here. What differs between architectures is an
entry of ARCHITECTURES. Every ``<arch>.*`` key must be understood: one that is not could change the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.architectures import ARCHITECTURES, Architecture
from llmjax.checkpoint.gguf.file import GGUFFile, GGUFTensor
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import (
    CORRECTION,
    END_KEYS,
    FUSED_QKV,
    GATE,
    LAYER_NUMBER,
    LAYER_TENSOR,
    SAMPLING_KEYS,
    SHARED_GATE,
    SINKS,
    UP,
    hf_name,
    layer_stem,
)
from llmjax.checkpoint.gguf.rope import ROPE_TENSORS, rope_config
from llmjax.errors import CheckpointError
from llmjax.weights.packing import RowSource


@dataclass(frozen=True, eq=False)
class ConvertedTensor:
    """A GGUF tensor under its Hugging Face name, with the converter's change undone when it is read.

    Attributes:
        name: Hugging Face name.
        source: the stored tensor.
        interleaved_heads: heads whose rows are interleaved halves; 0: rows are in order.
        offset: what the stored values exceed the original ones by.
    """

    name: str
    source: GGUFTensor
    interleaved_heads: int = 0
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    @property
    def type_name(self) -> str:
        return self.source.type_name

    def row_source(self) -> RowSource | None:
        """Codes and scales of a quantized matrix."""
        return None if self.offset else self.source.row_source(self._row_order())

    def matrix(self, index: int, rows: slice, name: str) -> ConvertedTensor:
        """See `StoredStack`."""
        one = self.source.row_slice(index, index + 1)
        return replace(self, name=name, source=replace(one, shape=one.shape[1:]).row_slice(rows.start, rows.stop))

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The original values; see `GGUFTensor.read`."""
        order = self._row_order()
        if self.offset:
            return (self.source.read(np.dtype(np.float32)) - np.float32(self.offset)).astype(dtype)
        if order is not None and len(self.shape) == 1:  # a bias: its rows are its elements
            return self.source.read(dtype)[order]
        return self.source.read(dtype, row_order=order)

    def _row_order(self) -> np.ndarray | None:
        """Row (head, half, i) is stored row (head, i, half)."""
        rows, heads = self.shape[0], self.interleaved_heads
        if not heads:
            return None
        if rows % (2 * heads):
            raise CheckpointError(
                f"{self.source.path}: tensor {self.source.name!r} has {rows} rows, not an even number for {heads} heads"
            )
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows)


def architecture_of(gguf: GGUFFile) -> Architecture:
    """The entry of ARCHITECTURES for a file.

    Raises:
        CheckpointError: the key is missing or its value unknown.
    """
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{gguf.path}: key 'general.architecture' is missing or not a string")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{gguf.path}: architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def hf_config(gguf: GGUFFile) -> dict[str, Any]:
    """The content that config.json had before conversion, as far as inference needs it.

    Raises:
        CheckpointError: the architecture or a key is unknown, a key is missing, or a value makes no sense.
    """
    architecture = architecture_of(gguf)
    keys = ArchitectureKeys(gguf)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{gguf.path}: tensor 'token_embd.weight' is missing")
    blocks = keys.integer("block_count")
    _check_layers(gguf, blocks)
    layers = blocks - keys.integer("nextn_predict_layers", 0, least=0)  # the last ones guess further tokens
    if layers < 1:
        keys.fail("nextn_predict_layers", f"leaves no layer of {blocks}")
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    if "attention.key_length" not in keys and hidden % heads:
        keys.fail("attention.key_length", f"is missing, and {hidden} cannot be divided among {heads} heads")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    keys.only("attention.value_length", head_dim)
    context = keys.integer("context_length")
    keys.integer("vocab_size", embedding.shape[0])  # the embedding's rows are what counts
    (act_key, act), (stored_eps, eps_key) = architecture.activation, architecture.eps
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "torch_dtype": _original_dtype(gguf),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        eps_key: keys.number(stored_eps),
        act_key: act,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    if architecture.bias_keys:
        config["attention_bias"] = not gguf.tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"))
        config["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    config |= rope_config(gguf, keys, head_dim=head_dim, context=context)
    config |= architecture.specialize(keys, config, gguf)
    config |= _special_tokens(gguf, config["vocab_size"])
    keys.only("attention.scale", head_dim**-0.5)
    keys.refuse_unread()
    return config


def hf_tensors(gguf: GGUFFile, config: Mapping[str, Any]) -> dict[str, ConvertedTensor]:
    """Tensors by Hugging Face name; one that has no such name keeps its own, so that it is seen to be unused.

    Args:
        gguf: a file of a supported architecture.
        config: what `hf_config` returned for it.
    """
    architecture = architecture_of(gguf)
    modules, heads = architecture.modules(gguf), {}
    if architecture.permuted_qk:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, ConvertedTensor] = {}
    for tensor in _split_fused(gguf, config, fused_gate=architecture.fused_gate):
        if tensor.name in ROPE_TENSORS:  # part of the config by now
            continue
        block = LAYER_NUMBER.match(tensor.name)
        if block is not None and int(block["layer"]) >= config["num_hidden_layers"]:  # guesses further tokens
            continue
        weight = f"{tensor.name.removesuffix('.scale')}.weight"
        if tensor.name.endswith(".scale") and weight in gguf.tensors:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} scales {weight!r}, which is not supported")
        name, stem = hf_name(tensor.name, modules), layer_stem(tensor.name)
        if stem in (SINKS, CORRECTION):  # which models have without a suffix
            name = name.rpartition(".")[0]
        if stem == CORRECTION and len(tensor.shape) == 2 and tensor.shape[0] == 1:
            tensor = replace(tensor, shape=tensor.shape[1:])
        if name in tensors:
            raise CheckpointError(
                f"{tensor.path}: tensors {tensors[name].source.name!r} and {tensor.name!r} are both {name!r}"
            )
        is_vector = stem == SHARED_GATE and len(tensor.shape) == 1  # a matrix of one row, as models have it
        tensors[name] = ConvertedTensor(
            name=name,
            source=replace(tensor, shape=(1, *tensor.shape)) if is_vector else tensor,
            interleaved_heads=heads.get(stem, 0),
            offset=architecture.norm_offset if tensor.name.endswith("norm.weight") else 0.0,
        )
    return tensors


def _split_fused(gguf: GGUFFile, config: Mapping[str, Any], *, fused_gate: bool) -> Iterator[GGUFTensor]:
    """Every tensor, with ``attn_qkv`` (of some families, and of converters that were asked for it) as the three that it
    consists of, and ``ffn_up`` as two where it holds the gate."""
    kv_rows, inner = config["num_key_value_heads"] * config["head_dim"], config["intermediate_size"]
    qkv = {"attn_q": config["num_attention_heads"] * config["head_dim"], "attn_k": kv_rows, "attn_v": kv_rows}
    fused = {FUSED_QKV: (qkv, "queries, keys and values")}
    if fused_gate:
        fused[UP] = ({GATE: inner, UP: inner}, "gate and up")
    for tensor in gguf.tensors.values():
        stem = layer_stem(tensor.name)
        if stem not in fused:
            yield tensor
            continue
        sizes, parts = fused[stem]
        if tensor.shape[0] != sum(sizes.values()):
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, not {sum(sizes.values())} "
                f"for {parts}"
            )
        start = 0
        for part, rows in sizes.items():
            name = tensor.name.replace(f".{stem}.", f".{part}.")
            yield replace(tensor.row_slice(start, start + rows), name=name)
            start += rows


def hf_generation_config(gguf: GGUFFile) -> dict[str, Any]:
    """generation_config.json from the sampler settings that a model's makers recommend, if the file has any."""
    found = {}
    for key, name in SAMPLING_KEYS.items():
        value = gguf.metadata.get(f"general.sampling.{key}")
        if value is not None:
            if not isinstance(value, int | float):
                raise CheckpointError(f"{gguf.path}: key 'general.sampling.{key}' is not a number")
            found[name] = value
    return {"do_sample": True, **found} if found else {}


def _check_layers(gguf: GGUFFile, layers: int) -> None:
    found = {int(match["layer"]) for name in gguf.tensors if (match := LAYER_TENSOR.fullmatch(name))}
    if len(found) != layers or max(found) != layers - 1:
        raise CheckpointError(f"{gguf.path}: block_count is {layers}, but the tensors are of {len(found)} layers")


def _original_dtype(gguf: GGUFFile) -> str:
    """What the weights most likely were: quantized models are published in bfloat16 first."""
    matrices = {tensor.type_name for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    if matrices <= {"F32"}:
        return "float32"
    return "float16" if matrices <= {"F32", "F16"} else "bfloat16"


def _special_tokens(gguf: GGUFFile, vocab_size: int) -> dict[str, Any]:
    """bos, pad and eos ids; several kinds of end (of turn, of message) become a list, as Hugging Face has it."""

    def token(kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        value = gguf.metadata.get(key)
        # Converters write -1, maybe as an unsigned number, for "none".
        if value is None or (type(value) is int and value in (-1, 0xFFFFFFFF)):
            return None
        if type(value) is not int or value < 0 or (value >= vocab_size and kind != "padding"):
            raise CheckpointError(f"{gguf.path}: key {key!r} is {value!r}, not one of {vocab_size} tokens")
        return value if value < vocab_size else None  # padding beyond the embedding is common and never used

    found: dict[str, Any] = {"bos_token_id": token("bos"), "pad_token_id": token("padding")}
    ends = list(dict.fromkeys(end for kind in END_KEYS if (end := token(kind)) is not None))
    found["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    return {name: value for name, value in found.items() if value is not None}
