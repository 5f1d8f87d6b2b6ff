"""Decoders with LayerNorm in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmjax.checkpoint.gguf.architecture import LAYER_NORM, Architecture, in_first_layer, layer_kinds, window_of
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import FUSED_QKV, HEAD_NORMS, LLAMA_LAYER
from llmjax.errors import CheckpointError


def _stablelm(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    # Converters have written use_parallel_residual for models that are not parallel; readers look at the tensors.
    keys.value("use_parallel_residual", False)
    return {
        "use_qkv_bias": in_first_layer(gguf, "attn_q.bias") or in_first_layer(gguf, f"{FUSED_QKV}.bias"),
        "qk_layernorm": in_first_layer(gguf, "attn_q_norm.weight"),
        "use_parallel_residual": not in_first_layer(gguf, "ffn_norm.weight"),
    }


def _gptneox(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    parallel = keys.flag("use_parallel_residual", True)
    return {"use_parallel_residual": parallel, "attention_bias": in_first_layer(gguf, f"{FUSED_QKV}.bias")}


def _gpt2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"]}


def _starcoder(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"], "multi_query": config["num_key_value_heads"] == 1}


def _falcon(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    kv_heads, norms = config["num_key_value_heads"], 2 if in_first_layer(gguf, "attn_norm_2.weight") else 1
    return {
        "ffn_hidden_size": config["intermediate_size"],
        "bias": in_first_layer(gguf, f"{FUSED_QKV}.bias"),
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
    return {"sliding_window": window_of(keys), "use_bias": in_first_layer(gguf, "attn_output.bias")}


def _command_r(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale"), "use_qk_norm": in_first_layer(gguf, "attn_q_norm.weight")}


def _cohere2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_kinds(keys, config["num_hidden_layers"], 4),
    }


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "phi2": Architecture(
            hf_class="PhiForCausalLM",
            model_type="phi",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_eps"),
            activation=("hidden_act", "gelu_new"),
        ),
        "stablelm": Architecture(
            hf_class="StableLmForCausalLM",
            model_type="stablelm",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_eps"),
            specialize=_stablelm,
        ),
        "gptneox": Architecture(
            hf_class="GPTNeoXForCausalLM",
            model_type="gpt_neox",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_eps"),
            activation=("hidden_act", "gelu"),
            specialize=_gptneox,
        ),
        "gpt2": Architecture(
            hf_class="GPT2LMHeadModel",
            model_type="gpt2",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_epsilon"),
            activation=("activation_function", "gelu_new"),
            specialize=_gpt2,
        ),
        "starcoder": Architecture(
            hf_class="GPTBigCodeForCausalLM",
            model_type="gpt_bigcode",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_epsilon"),
            activation=("activation_function", "gelu_pytorch_tanh"),
            specialize=_starcoder,
        ),
        "falcon": Architecture(
            hf_class="FalconForCausalLM",
            model_type="falcon",
            layer_tensors=LLAMA_LAYER,
            # The converter calls the norm of the attention sublayer the second one.
            variants={"attn_norm_2": {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}},
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_epsilon"),
            activation=("activation", "gelu"),
            specialize=_falcon,
        ),
        "bloom": Architecture(
            hf_class="BloomForCausalLM",
            model_type="bloom",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_epsilon"),
            specialize=_bloom,
        ),
        "mpt": Architecture(
            hf_class="MptForCausalLM",
            model_type="mpt",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_epsilon"),
            specialize=_mpt,
        ),
        "starcoder2": Architecture(
            hf_class="Starcoder2ForCausalLM",
            model_type="starcoder2",
            layer_tensors=LLAMA_LAYER,
            bias_keys=False,
            eps=(LAYER_NORM, "norm_epsilon"),
            activation=("hidden_act", "gelu_pytorch_tanh"),
            specialize=_starcoder2,
        ),
        "command-r": Architecture(
            hf_class="CohereForCausalLM",
            model_type="cohere",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS,
            eps=(LAYER_NORM, "layer_norm_eps"),
            specialize=_command_r,
        ),
        "cohere2": Architecture(
            hf_class="Cohere2ForCausalLM",
            model_type="cohere2",
            layer_tensors=LLAMA_LAYER,
            eps=(LAYER_NORM, "layer_norm_eps"),
            specialize=_cohere2,
        ),
    }
)
