"""Models with latent attention in GGUF files: their keys of config.json.

Source: llama.cpp's converters of DeepSeek V2 and V3.2, GLM-5, MiniCPM 3 and Kimi Linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.architecture import Architecture
from llmjax.checkpoint.gguf.changes import Change, log_of_minus
from llmjax.checkpoint.gguf.experts import deepseek_experts
from llmjax.checkpoint.gguf.file import GGUFFile, GGUFTensor
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import (
    CHANNEL_DELTA,
    CONVOLUTIONS,
    CORRECTION,
    CORRECTION_TENSORS,
    DECAY,
    EXPERT_TENSORS,
    INDEXER_TENSORS,
    LATENT_LAYER,
    SHARED_EXPERTS_TENSORS,
    has_any,
)

SOFTMAX, SIGMOID = 1, 2
SHARED_FROM = 1 << 20  # tokens of GLM-5.2's context, by which llama.cpp too tells it from GLM-5
LOG_MULTIPLIER = 0.1  # converters multiply DeepSeek's ``mscale_all_dim`` by it


def latent_sizes(keys: ArchitectureKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of heads and latent vectors, under DeepSeek's names.

    In files with two separate up-projections, the usual keys have the sizes of keys and values that kernels see (latent
    vectors), and keys that end in ``_mla`` have those of heads.
    """
    heads, turned = config["num_attention_heads"], config["head_dim"]
    q_rank, kv_rank = keys.integer("attention.q_lora_rank", 0, least=0), keys.integer("attention.kv_lora_rank")
    value_default = config["hidden_size"] // heads
    if "attention.key_length_mla" in keys:
        keys.only("attention.key_length", kv_rank + turned)
        keys.only("attention.value_length", kv_rank)
        whole, value = keys.integer("attention.key_length_mla"), keys.integer("attention.value_length_mla")
    else:
        whole = keys.integer("attention.key_length")
        value = keys.integer("attention.value_length", value_default)
    if whole <= turned:
        keys.fail("rope.dimension_count", f"is {turned}, but a key has {whole} elements, some of which are not rotated")
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": q_rank or None,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": whole - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
    }


def deepseek2(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of DeepSeek V2 if the router is a softmax, else of V3."""
    found = latent_sizes(keys, config)
    if (scaling := config["rope_scaling"]) is not None and (log := keys.number("rope.scaling.yarn_log_multiplier", 0)):
        both = round(log / LOG_MULTIPLIER, 6)
        found["rope_scaling"] = {**scaling, "mscale": both, "mscale_all_dim": both}
    if not keys.integer("expert_count", 0, least=0):
        for key in ("expert_shared_count", "expert_feed_forward_length", "leading_dense_block_count"):
            keys.value(key, 0)
        return found | {"n_routed_experts": None, "first_k_dense_replace": config["num_hidden_layers"]}
    # Files of V2 and of GLM-4.7-Flash do not say it; only routers with a sigmoid have corrections.
    corrected = has_any(gguf.tensors, f"{CORRECTION}.bias", f"{CORRECTION}.weight")
    gating = keys.integer("expert_gating_func", SIGMOID if corrected else SOFTMAX)
    found |= deepseek_experts(keys, config, gguf, gating=gating, normalize=False)
    if gating == SIGMOID:
        found |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        return found | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if gating != SOFTMAX:
        keys.fail("expert_gating_func", f"is {gating}; supported are {SOFTMAX}, softmax, and {SIGMOID}, sigmoid")
    method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return found | {"scoring_func": "softmax", "topk_method": method}


def deepseek32(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of V3 with the indexers of V3.2 and GLM-5."""
    keys.only("expert_gating_func", SIGMOID)
    own = {key: config[key] for key in ("architectures", "model_type")}
    return deepseek2(keys, config, gguf) | {
        "index_n_heads": keys.integer("attention.indexer.head_count"),
        "index_head_dim": keys.integer("attention.indexer.key_length"),
        "index_topk": keys.integer("attention.indexer.top_k"),
        **own,
    }


def glm_dsa(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of GLM-5, and of GLM-5.2, whose layers share indexers."""
    found, count = deepseek32(keys, config, gguf), config["num_hidden_layers"]
    if config["max_position_embeddings"] >= SHARED_FROM:
        found |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}  # where no key says it
    key = "attention.indexer.types"
    if key not in keys:
        return found
    types = keys.value(key)
    if not isinstance(types, np.ndarray) or types.shape != (count,):
        keys.fail(key, f"is not one for each of {count} layers")
    return found | {"indexer_types": ["full" if one else "shared" for one in types]}


def kimi_linear(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of Kimi Linear; layers without attention have Kimi's delta rule, with a head for each row of its rates."""
    keys.value("attention.value_length", 0)  # of attention that it does not have: hidden size over heads
    count = config["num_hidden_layers"]
    full = [layer for layer, one in enumerate(keys.concerned("attention.head_count_kv", count), 1) if one]
    delta = [layer for layer in range(1, count + 1) if layer not in full]
    found = latent_sizes(keys, config) | deepseek_experts(keys, config, gguf, gating=SIGMOID, normalize=True)
    rates = [gguf.tensors.get(f"blk.{layer - 1}.ssm_beta.weight") for layer in delta]
    heads = {None if one is None else one.shape[0] for one in rates} or {config["num_attention_heads"]}
    if len(heads) > 1 or None in heads:
        keys.fail("attention.head_count_kv", "is 0 for a layer without 'ssm_beta.weight', or with another size of it")
    own = {
        "full_attn_layers": full,
        "kda_layers": delta,
        "num_heads": heads.pop(),
        "head_dim": keys.integer("kda.head_dim"),
        "short_conv_kernel_size": keys.integer("ssm.conv_kernel"),
    }
    return found | {"linear_attn_config": own, "mla_use_nope": True, "scoring_func": "sigmoid"}


def _convolution(tensor: GGUFTensor, config: Mapping[str, Any]) -> Change:
    *channels, width = tensor.shape
    return Change(shape=(int(np.prod(channels)), 1, width))


def _decays(tensor: GGUFTensor, config: Mapping[str, Any]) -> Change:
    return Change(values=log_of_minus, shape=(1, 1, int(np.prod(tensor.shape)), 1))


def minicpm3(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of MiniCPM 3; the file has no keys for its factors."""
    return latent_sizes(keys, config) | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


EXPERTS_LAYER = LATENT_LAYER | EXPERT_TENSORS | SHARED_EXPERTS_TENSORS | CORRECTION_TENSORS
INDEXED_LAYER = EXPERTS_LAYER | INDEXER_TENSORS
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "deepseek2": Architecture(
            hf_class="DeepseekV2ForCausalLM",
            model_type="deepseek_v2",
            layer_tensors=EXPERTS_LAYER,
            latent=True,
            specialize=deepseek2,
        ),
        "deepseek32": Architecture(
            hf_class="DeepseekV32ForCausalLM",
            model_type="deepseek_v32",
            layer_tensors=INDEXED_LAYER,
            latent=True,
            specialize=deepseek32,
        ),
        "glm-dsa": Architecture(
            hf_class="GlmMoeDsaForCausalLM",
            model_type="glm_moe_dsa",
            layer_tensors=INDEXED_LAYER,
            latent=True,
            specialize=glm_dsa,
        ),
        "kimi-linear": Architecture(
            hf_class="KimiLinearForCausalLM",
            model_type="kimi_linear",
            layer_tensors=EXPERTS_LAYER | CHANNEL_DELTA,
            bias_keys=False,
            latent=True,
            mixed=True,
            changes=dict.fromkeys(CONVOLUTIONS, _convolution) | {DECAY: _decays},
            specialize=kimi_linear,
        ),
        "minicpm3": Architecture(
            hf_class="MiniCPM3ForCausalLM",
            model_type="minicpm3",
            layer_tensors=LATENT_LAYER,
            latent=True,
            specialize=minicpm3,
        ),
    }
)
