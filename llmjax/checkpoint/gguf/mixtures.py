"""Decoders with experts in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmjax.checkpoint.gguf.architecture import LAYER_NORM, Architecture, in_first_layer, layer_kinds
from llmjax.checkpoint.gguf.experts import deepseek_experts, qwen_experts, same_experts
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.like_llama import ernie, glm, granite, phi3
from llmjax.checkpoint.gguf.names import (
    CORRECTION_TENSORS,
    EXPERT_TENSORS,
    HEAD_NORMS,
    LLAMA_LAYER,
    NORM_BEFORE_MLP,
    SHARED_EXPERT_TENSORS,
    SHARED_EXPERTS_TENSORS,
    SHARED_MLP_TENSORS,
    SINK_TENSORS,
)
from llmjax.models import dbrx

MAVERICK_EXPERTS = 128


def _gpt_oss(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("expert_gating_func", 3)  # a softmax over a token's experts
    keys.only("expert_feed_forward_length", config["intermediate_size"])
    scaling = config["rope_scaling"]
    return {
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_kinds(keys, config["num_hidden_layers"], 2),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        # No key says that its ramp is not rounded to whole frequencies.
        "rope_scaling": {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False},
    }


def _deepseek(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    found = deepseek_experts(keys, config, gguf, gating=1, normalize=False)
    for key in ("n_group", "topk_group"):
        del found[key]
    return found


def _dots1(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return {"sliding_window": None, **deepseek_experts(keys, config, gguf, gating=2, normalize=False)}


def _glm4_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    experts = deepseek_experts(keys, config, gguf, gating=2, normalize=True)
    return {"use_qk_norm": in_first_layer(gguf, "attn_q_norm.weight"), **glm(keys, config, gguf), **experts}


def _ernie_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    experts = deepseek_experts(keys, config, gguf, gating=1, normalize=True)
    return ernie(keys, config, gguf) | {
        "moe_num_experts": experts["n_routed_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "moe_num_shared_experts": experts["n_shared_experts"] or 0,
        "moe_layer_start_index": experts["first_k_dense_replace"],
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("expert_shared_count", 1)
    keys.only("expert_shared_feed_forward_length", config["intermediate_size"])
    found = same_experts(keys, config, gguf)
    return {"num_experts": found["num_local_experts"], "moe_topk": found["num_experts_per_tok"]}


def _granite_moe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    found = granite(keys, config, gguf) | same_experts(keys, config, gguf)
    if shared := keys.integer("expert_shared_feed_forward_length", 0, least=0):
        found |= {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
        found["shared_intermediate_size"] = shared
    return found


def _minimax_m2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    return glm(keys, config, gguf) | same_experts(keys, config, gguf, gating=2)


def _phimoe(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("expert_gating_func", 1)
    return phi3(keys, config, gguf) | {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "lm_head_bias": "output.bias" in gguf.tensors,
    }


def _dbrx(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    if config["layer_norm_eps"] != dbrx.EPS:
        keys.fail(LAYER_NORM, f"is not {dbrx.EPS}")
    experts = same_experts(keys, config, gguf)
    clip = keys.number("attention.clamp_kqv", 0.0) or None
    return {
        "attn_config": {"kv_n_heads": config["num_key_value_heads"], "clip_qkv": clip},
        "ffn_config": {
            "ffn_hidden_size": config["intermediate_size"],
            "moe_num_experts": experts["num_local_experts"],
            "moe_top_k": experts["num_experts_per_tok"],
        },
    }


def _llama4(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    keys.only("expert_gating_func", 2)
    keys.only("expert_weights_scale", 1.0)
    keys.only("expert_weights_norm", False)
    keys.only("leading_dense_block_count", 0)
    keys.only("attention.sliding_window_pattern", 4)
    keys.only("rope.freq_base_swa", config["rope_theta"])
    experts = keys.integer("expert_count")
    return {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step", 1),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "attention_chunk_size": keys.integer("attention.sliding_window", 8192),
        # No key says it; llama.cpp goes by the number of experts too.
        "use_qk_norm": experts != MAVERICK_EXPERTS,
    }


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
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
        "olmoe": Architecture(
            hf_class="OlmoeForCausalLM",
            model_type="olmoe",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS,
            specialize=qwen_experts,
        ),
        "gpt-oss": Architecture(
            hf_class="GptOssForCausalLM",
            model_type="gpt_oss",
            layer_tensors=LLAMA_LAYER | NORM_BEFORE_MLP | EXPERT_TENSORS | SINK_TENSORS,
            specialize=_gpt_oss,
        ),
        "deepseek": Architecture(
            hf_class="DeepseekForCausalLM",
            model_type="deepseek",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_EXPERTS_TENSORS,
            permuted_qk=True,
            specialize=_deepseek,
        ),
        "dots1": Architecture(
            hf_class="Dots1ForCausalLM",
            model_type="dots1",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS | SHARED_EXPERTS_TENSORS | CORRECTION_TENSORS,
            specialize=_dots1,
        ),
        "glm4moe": Architecture(
            hf_class="Glm4MoeForCausalLM",
            model_type="glm4_moe",
            layer_tensors=LLAMA_LAYER
            | HEAD_NORMS
            | NORM_BEFORE_MLP
            | EXPERT_TENSORS
            | SHARED_EXPERTS_TENSORS
            | CORRECTION_TENSORS,
            specialize=_glm4_moe,
        ),
        "ernie4_5-moe": Architecture(
            hf_class="Ernie4_5_MoeForCausalLM",
            model_type="ernie4_5_moe",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_EXPERTS_TENSORS | CORRECTION_TENSORS,
            bias_keys=False,
            specialize=_ernie_moe,
        ),
        "hunyuan-moe": Architecture(
            hf_class="HunYuanMoEV1ForCausalLM",
            model_type="hunyuan_v1_moe",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS | SHARED_MLP_TENSORS,
            specialize=_hunyuan_moe,
        ),
        "granitemoe": Architecture(
            hf_class="GraniteMoeForCausalLM",
            model_type="granitemoe",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | SHARED_MLP_TENSORS,
            permuted_qk=True,
            specialize=_granite_moe,
        ),
        "minimax-m2": Architecture(
            hf_class="MiniMaxM2ForCausalLM",
            model_type="minimax_m2",
            layer_tensors=LLAMA_LAYER | HEAD_NORMS | EXPERT_TENSORS | CORRECTION_TENSORS,
            specialize=_minimax_m2,
        ),
        "phimoe": Architecture(
            hf_class="PhimoeForCausalLM",
            model_type="phimoe",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS,
            specialize=_phimoe,
        ),
        "dbrx": Architecture(
            hf_class="DbrxForCausalLM",
            model_type="dbrx",
            layer_tensors=LLAMA_LAYER | EXPERT_TENSORS | {"attn_output_norm": "post_attention_layernorm"},
            bias_keys=False,
            eps=(LAYER_NORM, "layer_norm_eps"),
            specialize=_dbrx,
        ),
        "llama4": Architecture(
            hf_class="Llama4ForCausalLM",
            model_type="llama4_text",
            layer_tensors=LLAMA_LAYER
            | EXPERT_TENSORS
            | {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
            specialize=_llama4,
        ),
    }
)
