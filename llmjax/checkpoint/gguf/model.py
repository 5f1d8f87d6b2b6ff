"""Presents a GGUF file as a Hugging Face checkpoint: its config.json, and its tensors under their original names.

The converter renames tensors, permutes query and key rows of Llama-likes, adds one to Gemma's norm weights and
keeps long-context frequencies in tensors; all of it is undone here. Differences between architectures are entries
of ARCHITECTURES. Every ``<arch>.*`` key must be understood, since an unknown one could change the result.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax import models
from llmjax.checkpoint.gguf.architecture import LAYER_NORM, Architecture
from llmjax.checkpoint.gguf.architectures import ARCHITECTURES
from llmjax.checkpoint.gguf.changes import UNCHANGED, Change, halves_apart, minus
from llmjax.checkpoint.gguf.file import GGUFFile, GGUFTensor
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import (
    BOTH_UP,
    CORRECTION,
    END_KEYS,
    FUSED_QKV,
    GATE,
    HEADS_NORM,
    KEYS_UP,
    LATENT_LAYER,
    LAYER_NUMBER,
    LAYER_TENSOR,
    LLAMA_LAYER,
    SAMPLING_KEYS,
    SHARED_GATE,
    UP,
    VALUES_UP,
    has_any,
    hf_name,
    layer_stem,
)
from llmjax.checkpoint.gguf.rope import ROPE_TENSORS, rope_config
from llmjax.checkpoint.stored_tensor import Derived, StoredTensor
from llmjax.errors import CheckpointError
from llmjax.weights.memory import aligned_empty
from llmjax.weights.packing import RowSource

QUERIES_AND_KEYS = MappingProxyType({"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"})
"""Stems of what is rotated, each with the key of how many heads it has."""


@dataclass(frozen=True, eq=False)
class ConvertedTensor:
    """A GGUF tensor under its Hugging Face name, with the converter's change undone when it is read.

    Attributes:
        name: Hugging Face name.
        source: the stored tensor.
        change: how the original is made from it.
    """

    name: str
    source: GGUFTensor
    change: Change = UNCHANGED

    @property
    def shape(self) -> tuple[int, ...]:
        if self.change.shape is not None:
            return self.change.shape
        rows = self.change.rows
        return self.source.shape if rows is None else (len(rows), *self.source.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    @property
    def type_name(self) -> str:
        return self.source.type_name

    def row_source(self) -> RowSource | None:
        """Codes and scales of a quantized matrix."""
        change = self.change
        if change.values is not None or change.shape is not None:
            return None
        logical = None if change.columns is None else np.argsort(change.columns).astype(np.int32)
        return self.source.row_source(change.rows, logical)

    def matrix(self, index: int, rows: slice, name: str) -> ConvertedTensor:
        """See `StoredStack`."""
        one = self.source.row_slice(index, index + 1)
        return replace(self, name=name, source=replace(one, shape=one.shape[1:]).row_slice(rows.start, rows.stop))

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The original values; see `GGUFTensor.read`."""
        change, is_vector = self.change, len(self.source.shape) == 1
        if change.values is not None:
            try:
                values = change.values(self.source.read(np.dtype(np.float32))).astype(dtype)
            except ValueError as error:
                raise CheckpointError(f"{self.source.path}: tensor {self.source.name!r} {error}") from None
            values = values if change.rows is None else values[change.rows]
        elif is_vector:  # its rows are its elements
            values = self.source.read(dtype)
            values = values if change.rows is None else values[change.rows]
        else:
            values = self.source.read(dtype, row_order=change.rows)
        if change.columns is not None:
            values = np.ascontiguousarray(values[:, change.columns])
        return values.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class UpProjections(Derived):
    """The projections from latent vectors to keys and values, as one matrix.

    Attributes:
        sources: keys [heads, latent, key size], each head's transposed to be multiplied with queries; values [heads,
            value size, latent].
    """

    sources: tuple[GGUFTensor, GGUFTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        keys, values = self.sources
        heads, latent, of_keys = keys.shape
        return (heads * (of_keys + values.shape[1]), latent)

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The values, read head by head; see `StoredTensor.read`."""
        keys, values = self.sources
        heads, _, of_keys = keys.shape
        found = aligned_empty(self.shape, dtype)
        by_head = found.reshape(heads, -1, self.shape[1])
        for head in range(heads):
            by_head[head, :of_keys] = keys.row_slice(head, head + 1).read(dtype)[0].T
            by_head[head, of_keys:] = values.row_slice(head, head + 1).read(dtype)[0]
        return found


@dataclass(frozen=True, eq=False)
class KeyNumber:
    """A number of a layer that is a key in files (a `StoredTensor`)."""

    name: str
    number: float
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 4

    @property
    def type_name(self) -> str:
        return "F32"

    def row_source(self) -> None:
        """It is a plain number."""

    def read(self, dtype: np.dtype) -> np.ndarray:
        """See `StoredTensor.read`."""
        return np.full(self.shape, self.number, dtype)


def architecture_of(gguf: GGUFFile) -> Architecture:
    """The entry of ARCHITECTURES for a file.

    Raises:
        CheckpointError: the key is missing or its value unknown.
    """
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{gguf.path}: key 'general.architecture' is missing or not a string")
    if name not in ARCHITECTURES:
        nearest = "".join(
            f"; the nearest in name is {known}" for known in difflib.get_close_matches(name[:100], ARCHITECTURES, n=1)
        )
        raise CheckpointError(
            f"{gguf.path}: architecture {name!r} is not supported{nearest}; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def hf_config(gguf: GGUFFile) -> dict[str, Any]:
    """The content of config.json before conversion, as far as inference needs it.

    Raises:
        CheckpointError: the architecture or a key is unknown, a key is missing, or a value makes no sense.
    """
    architecture = architecture_of(gguf)
    keys = ArchitectureKeys(gguf)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{gguf.path}: tensor 'token_embd.weight' is missing")
    blocks = keys.integer("block_count")
    layers = blocks - keys.integer("nextn_predict_layers", 0, least=0)  # the last ones guess further tokens
    if layers < 1:
        keys.fail("nextn_predict_layers", f"leaves no layer of {blocks}")
    _check_layers(gguf, blocks, layers)
    context = keys.integer("context_length")
    keys.integer("vocab_size", embedding.shape[0])  # the embedding's rows are what counts
    (act_key, act), (stored_eps, eps_key) = architecture.activation, architecture.eps
    if stored_eps not in keys and LAYER_NORM in keys:  # as in files of Nemotron-H
        stored_eps = LAYER_NORM
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "torch_dtype": _original_dtype(gguf),
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": layers,
        "max_position_embeddings": context,
        eps_key: keys.number(stored_eps),
        act_key: act,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    if architecture.attends:
        config |= _attention(gguf, keys, architecture, hidden=config["hidden_size"], context=context)
    if architecture.bias_keys:
        biases = (f"{stem}.bias" for stem in ("attn_q", FUSED_QKV, "attn_q_a"))
        config["attention_bias"] = has_any(gguf.tensors, *biases)
        config["mlp_bias"] = has_any(gguf.tensors, f"{UP}.bias")
    config |= architecture.specialize(keys, config, gguf)
    config |= _special_tokens(gguf, config["vocab_size"])
    if architecture.attends:
        keys.only("attention.scale", config["head_dim"] ** -0.5)
    keys.refuse_unread()
    return config


def _attention(
    gguf: GGUFFile, keys: ArchitectureKeys, architecture: Architecture, *, hidden: int, context: int
) -> dict[str, Any]:
    """Keys about heads and positions, and about the dense MLP, which all models with attention have."""
    count = keys.integer_of_some if architecture.mixed else keys.integer
    heads = count("attention.head_count")
    if architecture.latent:
        head_dim = keys.integer("rope.dimension_count")  # what is rotated; `specialize` reads the other sizes
    else:
        if "attention.key_length" not in keys and hidden % heads:
            keys.fail("attention.key_length", f"is missing, and {hidden} cannot be divided among {heads} heads")
        head_dim = keys.integer("attention.key_length", hidden // heads)
        keys.only("attention.value_length", head_dim)
    return {
        "intermediate_size": count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        **rope_config(gguf, keys, head_dim=head_dim, context=context),
    }


def hf_tensors(gguf: GGUFFile, config: Mapping[str, Any]) -> dict[str, ConvertedTensor]:
    """Tensors by Hugging Face name; one outside of layers that has no such name keeps its own, so that it is seen to be
    unused.

    Args:
        gguf: a file of a supported architecture.
        config: what `hf_config` returned for it.

    Raises:
        CheckpointError: a tensor is none that layers of the architecture have, or has another shape.
    """
    architecture = architecture_of(gguf)
    modules, own = architecture.modules(gguf), models.tensor_names(config) if architecture.family_names else None
    fused_qkv = modules.get(FUSED_QKV) == LLAMA_LAYER[FUSED_QKV]
    tensors: dict[str, ConvertedTensor] = {}
    for tensor in _split_fused(gguf, config, fused_qkv=fused_qkv, fused_gate=architecture.fused_gate):
        if tensor.name in ROPE_TENSORS:  # part of the config by now
            continue
        block = LAYER_NUMBER.match(tensor.name)
        if block is not None and int(block["layer"]) >= config["num_hidden_layers"]:  # guesses further tokens
            continue
        if (stack := architecture.stacks.get(tensor.name.removesuffix(".weight"))) is not None:
            tensors |= {one.name: one for one in _taken_apart(tensor, stack)}
            continue
        if (name := _scale_name(tensor.name, architecture)) is not None:
            tensors[name] = ConvertedTensor(name, tensor)
            continue
        weight = f"{tensor.name.removesuffix('.scale')}.weight"
        if tensor.name.endswith(".scale") and weight in gguf.tensors:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} scales {weight!r}, which is not supported")
        stem = layer_stem(tensor.name)
        if stem in (KEYS_UP, VALUES_UP) and BOTH_UP in modules:  # see `hf_joined_tensors`
            continue
        parts = {} if stem not in architecture.parts else architecture.parts[stem](tensor, config)
        for module, change in (parts or {modules.get(stem, ""): _change(tensor, stem, architecture, config)}).items():
            name = hf_name(tensor.name, {**modules, stem: module} if module else modules)
            if block is not None and name == tensor.name:
                raise CheckpointError(
                    f"{tensor.path}: tensor {name!r} is not understood: {config['architectures'][0]} has none like it, "
                    "so the model is another one than general.architecture says"
                )
            if own is not None and block is not None:
                module, _, suffix = name.removeprefix("model.").rpartition(".")
                name = f"{own.in_model(module)[0]}.{suffix}"
            if name in tensors:
                raise CheckpointError(
                    f"{tensor.path}: tensors {tensors[name].source.name!r} and {tensor.name!r} are both {name!r}"
                )
            tensors[name] = ConvertedTensor(name, tensor, change)
    return tensors


def _taken_apart(stack: GGUFTensor, module: str) -> Iterator[ConvertedTensor]:
    """The matrices of a stack, which are weights of modules numbered below ``module``."""
    if len(stack.shape) != 3:
        raise CheckpointError(f"{stack.path}: tensor {stack.name!r} has shape {list(stack.shape)}, not that of a stack")
    for index in range(stack.shape[0]):
        name, whole = f"{module}.{index}.weight", slice(0, stack.shape[1])
        yield ConvertedTensor(name, stack).matrix(index, whole, name)


def _scale_name(name: str, architecture: Architecture) -> str | None:
    """The model's name of ``blk.N.<stem>.scale``, where the architecture has such tensors."""
    block = LAYER_NUMBER.match(name)
    if block is None or not name.endswith(".scale"):
        return None
    scale = architecture.scales.get(name[block.end() :].removesuffix(".scale"))
    return None if scale is None else f"model.layers.{int(block['layer'])}.{scale}"


def hf_joined_tensors(gguf: GGUFFile, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Tensors that files store in two parts, by Hugging Face name; arguments as for `hf_tensors`.

    Raises:
        CheckpointError: one of two is missing, or they do not fit each other.
    """
    found: dict[str, StoredTensor] = {}
    for layer in range(config["num_hidden_layers"]):
        names = [f"blk.{layer}.{stem}.weight" for stem in (KEYS_UP, VALUES_UP, BOTH_UP)]
        keys, values, both = (gguf.tensors.get(name) for name in names)
        if both is not None or (keys is None and values is None):
            continue
        if keys is None or values is None:
            there, missing = (names[1], names[0]) if keys is None else (names[0], names[1])
            raise CheckpointError(f"{gguf.path}: tensor {missing!r} is missing, but {there!r} is there")
        if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != (values.shape[0], values.shape[2]):
            raise CheckpointError(
                f"{gguf.path}: tensors {names[0]!r} of shape {list(keys.shape)} and {names[1]!r} of "
                f"{list(values.shape)} are not keys and values of the same heads"
            )
        name = f"model.layers.{layer}.{LATENT_LAYER[BOTH_UP]}.weight"
        found[name] = UpProjections(name, (keys, values))
    return found


def hf_key_numbers(gguf: GGUFFile, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Tensors that are keys in a file, by Hugging Face name; arguments as for `hf_tensors`.

    Raises:
        CheckpointError: a key is missing, or has not one number for each layer.
    """
    found: dict[str, StoredTensor] = {}
    for key, (module, shape) in architecture_of(gguf).numbers.items():
        values, count = gguf.metadata.get(key), config["num_hidden_layers"]
        if not isinstance(values, np.ndarray) or values.shape != (count,) or values.dtype.kind != "f":
            raise CheckpointError(f"{gguf.path}: key {key!r} is not one number for each of {count} layers")
        for layer, value in enumerate(values.tolist()):
            name = f"model.layers.{layer}.{module}"
            found[name] = KeyNumber(name, value, shape)
    return found


def _change(tensor: GGUFTensor, stem: str, architecture: Architecture, config: Mapping[str, Any]) -> Change:
    """The converter's change of a tensor.

    Raises:
        CheckpointError: the tensor has another shape than that makes.
    """
    try:
        if stem in architecture.changes:
            return architecture.changes[stem](tensor, config)
        if architecture.permuted_qk and stem in QUERIES_AND_KEYS:
            return Change(rows=halves_apart(tensor.shape[0], config[QUERIES_AND_KEYS[stem]]))
    except ValueError as error:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} {error}") from None
    if architecture.norm_offset and tensor.name.endswith("norm.weight") and stem != HEADS_NORM:
        return Change(values=minus(architecture.norm_offset))
    if stem == CORRECTION and len(tensor.shape) == 2 and tensor.shape[0] == 1:
        return Change(shape=tensor.shape[1:])
    if stem == SHARED_GATE and len(tensor.shape) == 1:  # a matrix of one row, as models have it
        return Change(shape=(1, *tensor.shape))
    return UNCHANGED


def _split_fused(
    gguf: GGUFFile, config: Mapping[str, Any], *, fused_qkv: bool, fused_gate: bool
) -> Iterator[GGUFTensor]:
    """Every tensor, with ``attn_qkv`` (of some families, and of converters that were asked for it) as the three that it
    consists of, and ``ffn_up`` as two where it holds the gate."""
    fused = {}
    if fused_qkv:
        kv_rows = config["num_key_value_heads"] * config["head_dim"]
        qkv = {"attn_q": config["num_attention_heads"] * config["head_dim"], "attn_k": kv_rows, "attn_v": kv_rows}
        fused[FUSED_QKV] = (qkv, "queries, keys and values")
    if fused_gate:
        inner = config["intermediate_size"]
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


def _check_layers(gguf: GGUFFile, blocks: int, layers: int) -> None:
    """Checks that all blocks are there, except those that predict further tokens, which converters drop but count."""
    found = {int(match["layer"]) for name in gguf.tensors if (match := LAYER_TENSOR.fullmatch(name))}
    if len(found) not in (blocks, layers) or max(found) != len(found) - 1:
        raise CheckpointError(f"{gguf.path}: block_count is {blocks}, but the tensors are of {len(found)} layers")


def _original_dtype(gguf: GGUFFile) -> str:
    """The most likely type of the original weights: quantized models are published in bfloat16 first."""
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
