"""A GGUF file seen as a Hugging Face checkpoint: its config.json, and its tensors under their original names.

The converter renames tensors, permutes query and key rows of Llama-likes, adds one to Gemma's norm weights and
keeps long-context frequencies in tensors; all of it is undone here. What differs between architectures is an
entry of ARCHITECTURES. Every ``<arch>.*`` key must be understood: one that is not could change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.experts import mixtral_experts, qwen_experts
from llmjax.checkpoint.gguf.file import GGUFFile, GGUFTensor
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import (
    END_KEYS,
    EXPERT_TENSORS,
    FUSED_QKV,
    GATE,
    GEMMA_NORMS,
    HEAD_NORMS,
    LAYER_TENSOR,
    LLAMA_LAYER,
    SAMPLING_KEYS,
    SHARED_EXPERT_TENSORS,
    SHARED_GATE,
    UP,
    hf_name,
    layer_stem,
)
from llmjax.checkpoint.gguf.rope import ROPE_TENSORS, rope_config
from llmjax.errors import CheckpointError
from llmjax.weights.packing import RowSource


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one ``general.architecture`` maps to Hugging Face.

    Attributes:
        hf_class: name for config.json's ``architectures``.
        model_type: config.json's ``model_type``.
        layer_tensors: stem of ``blk.N.<stem>`` to the module below ``model.layers.N``.
        permuted_qk: query and key rows are stored for interleaved rotary embedding.
        norm_offset: what the converter added to weights ending in ``norm.weight``.
        bias_keys: whether config.json says which projections have biases (else the class knows).
        variants: by a stem that only some files have: modules that differ in these.
        fused_gate: ``ffn_up`` holds the gate too, before what it is multiplied with.
        eps: key of the norms' eps in the file, and in config.json.
        activation: config key and value of the MLP's activation.
        specialize: keys of this family only, taking what is known of the config so far, and the file.
    """

    hf_class: str
    model_type: str
    layer_tensors: Mapping[str, str]
    permuted_qk: bool = False
    norm_offset: float = 0.0
    bias_keys: bool = True
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fused_gate: bool = False
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    activation: tuple[str, str] = ("hidden_act", "silu")
    specialize: Callable[[ArchitectureKeys, dict[str, Any], GGUFFile], dict[str, Any]] = lambda keys, config, gguf: {}

    def modules(self, gguf: GGUFFile) -> Mapping[str, str]:
        """Those of a layer by stem, as a file has them."""
        found = dict(self.layer_tensors)
        for stem, differences in self.variants.items():
            if _in_first_layer(gguf, f"{stem}.weight"):
                found |= differences
        return found


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


def _llama(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    # Mistral shares llama's GGUF architecture and differs by its window alone, Mixtral by its experts.
    window = keys.integer("attention.sliding_window", 0, least=0)
    windowed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return (windowed if window else {}) | mixtral_experts(keys, config, gguf)


def _gemma3(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    # 27B, told by its depth, scales by hidden size over heads; no key carries query_pre_attn_scalar.
    scaled_by = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim
    scale = keys.number("attention.scale", scaled_by**-0.5)
    found: dict[str, Any] = {
        "query_pre_attn_scalar": round(scale**-2, 3),
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }
    pattern = keys.value("attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray):
        if pattern.shape != (layers,):
            keys.fail("attention.sliding_window_pattern", f"has {pattern.size} elements for {layers} layers")
        found["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in pattern.tolist()]
    else:
        found["sliding_window_pattern"] = keys.integer("attention.sliding_window_pattern", 6)
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        keys.only(key, head_dim)
    return found


def _window(keys: ArchitectureKeys) -> int | None:
    return keys.integer("attention.sliding_window", 0, least=0) or None


def _phi3(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"sliding_window": _window(keys), "original_max_position_embeddings": None}


def _in_first_layer(gguf: GGUFFile, name: str) -> bool:
    return f"blk.0.{name}" in gguf.tensors


def _stablelm(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    # Converters have written use_parallel_residual for models that are not parallel; readers look at the tensors.
    keys.value("use_parallel_residual", False)
    return {
        "use_qkv_bias": _in_first_layer(gguf, "attn_q.bias") or _in_first_layer(gguf, f"{FUSED_QKV}.bias"),
        "qk_layernorm": _in_first_layer(gguf, "attn_q_norm.weight"),
        "use_parallel_residual": not _in_first_layer(gguf, "ffn_norm.weight"),
    }


def _gptneox(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    parallel = keys.value("use_parallel_residual", True)
    return {"use_parallel_residual": parallel, "attention_bias": _in_first_layer(gguf, f"{FUSED_QKV}.bias")}


def _gpt2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"]}


def _starcoder(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"], "multi_query": config["num_key_value_heads"] == 1}


def _falcon(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    kv_heads, norms = config["num_key_value_heads"], 2 if _in_first_layer(gguf, "attn_norm_2.weight") else 1
    return {
        "ffn_hidden_size": config["intermediate_size"],
        "bias": _in_first_layer(gguf, f"{FUSED_QKV}.bias"),
        "new_decoder_architecture": kv_heads > 1 or norms == 2,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": norms,
    }


def _bloom(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("feed_forward_length", 4 * config["hidden_size"])
    return {}


def _mpt(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    for name in ("position_embd.weight", "blk.0.attn_q_norm.weight", f"blk.0.{FUSED_QKV}.bias"):
        if name in gguf.tensors:
            raise CheckpointError(f"{gguf.path}: tensor {name!r} is not supported with architecture 'mpt'")
    inner, hidden = config["intermediate_size"], config["hidden_size"]
    if inner % hidden:
        keys.fail("feed_forward_length", f"is {inner}, not a multiple of embedding_length = {hidden}")
    keys.value("attention.max_alibi_bias", 0.0)
    attention = {
        "alibi": keys.number("attention.max_alibi_bias", 0.0) > 0,
        "alibi_bias_max": keys.number("attention.max_alibi_bias", 0.0),
        "clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None,
    }
    return {"expansion_ratio": inner // hidden, "attn_config": attention}


def _starcoder2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"sliding_window": _window(keys), "use_bias": _in_first_layer(gguf, "attn_output.bias")}


_LAYER_NORM = "attention.layer_norm_epsilon"

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            hf_class="LlamaForCausalLM",
            model_type="llama",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS,
            permuted_qk=True,
            specialize=_llama,
        ),
        "qwen2": Architecture(
            hf_class="Qwen2ForCausalLM",
            model_type="qwen2",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
        ),
        "qwen3": Architecture(hf_class="Qwen3ForCausalLM", model_type="qwen3", layer_tensors=LLAMA_LAYER | HEAD_NORMS),
        "qwen2moe": Architecture(
            hf_class="Qwen2MoeForCausalLM",
            model_type="qwen2_moe",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_EXPERT_TENSORS,
            bias_keys=False,
            specialize=qwen_experts,
        ),
        "qwen3moe": Architecture(
            hf_class="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS,
            specialize=qwen_experts,
        ),
        "gemma3": Architecture(
            hf_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | GEMMA_NORMS,
            norm_offset=1.0,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            specialize=_gemma3,
        ),
        "phi2": Architecture(
            hf_class="PhiForCausalLM",
            model_type="phi",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            activation=("hidden_act", "gelu_new"),
        ),
        "phi3": Architecture(
            hf_class="Phi3ForCausalLM",
            model_type="phi3",
            layer_tensors=LLAMA_LAYER,
            fused_gate=True,
            specialize=_phi3,
        ),
        "stablelm": Architecture(
            hf_class="StableLmForCausalLM",
            model_type="stablelm",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            specialize=_stablelm,
        ),
        "gptneox": Architecture(
            hf_class="GPTNeoXForCausalLM",
            model_type="gpt_neox",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_eps"),
            activation=("hidden_act", "gelu"),
            specialize=_gptneox,
        ),
        "gpt2": Architecture(
            hf_class="GPT2LMHeadModel",
            model_type="gpt2",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            activation=("activation_function", "gelu_new"),
            specialize=_gpt2,
        ),
        "starcoder": Architecture(
            hf_class="GPTBigCodeForCausalLM",
            model_type="gpt_bigcode",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            activation=("activation_function", "gelu_pytorch_tanh"),
            specialize=_starcoder,
        ),
        "falcon": Architecture(
            hf_class="FalconForCausalLM",
            model_type="falcon",
            layer_tensors=LLAMA_LAYER,
            # The converter calls the norm of the attention half the second one.
            variants={"attn_norm_2": {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}},
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            activation=("activation", "gelu"),
            specialize=_falcon,
        ),
        "bloom": Architecture(
            hf_class="BloomForCausalLM",
            model_type="bloom",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            specialize=_bloom,
        ),
        "mpt": Architecture(
            hf_class="MptForCausalLM",
            model_type="mpt",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "layer_norm_epsilon"),
            specialize=_mpt,
        ),
        "starcoder2": Architecture(
            hf_class="Starcoder2ForCausalLM",
            model_type="starcoder2",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(_LAYER_NORM, "norm_epsilon"),
            activation=("hidden_act", "gelu_pytorch_tanh"),
            specialize=_starcoder2,
        ),
    }
)
"""Supported values of ``general.architecture``."""


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
    layers = keys.integer("block_count")
    _check_layers(gguf, layers)
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
        weight = f"{tensor.name.removesuffix('.scale')}.weight"
        if tensor.name.endswith(".scale") and weight in gguf.tensors:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} scales {weight!r}, which is not supported")
        name, stem = hf_name(tensor.name, modules), layer_stem(tensor.name)
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
