"""Golden checkpoints written as GGUF the way llama.cpp's converter does, with the names of the gguf package, are the
same models: equal configurations and, value by value, equal weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.experts import with_stacked_experts
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.model import hf_config
from llmjax.checkpoint.inspection import inspect_model
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.errors import CheckpointError
from llmjax.models import ModelConfig
from tests.checkpoint.gguf.test_model import write
from tests.checkpoints import GOLDEN, TESTS
from tests.models.conftest import Stepper

F32 = np.dtype(np.float32)
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Conversion:
    """What the converter does to a family.

    Attributes:
        arch: an architecture of the gguf package.
        keys: those of the architecture, of a config.json.
        changed: a tensor by its name in the source as it is stored.
        differences: what the configuration has for which GGUF has no key.
    """

    arch: gguf.MODEL_ARCH
    keys: Callable[[Config], dict[str, Any]]
    changed: Callable[[str, np.ndarray, Config], np.ndarray] = lambda name, values, config: values
    extra: Callable[[Config], dict[str, np.ndarray]] = lambda config: {}
    differences: dict[str, Any] = field(default_factory=dict)
    instead: Mapping[str, Any] = field(default_factory=dict)  # what files mean by keys of config.json they do not keep
    parts: Callable[[str, np.ndarray, Config], dict[str, np.ndarray]] = lambda name, values, config: {name: values}
    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of names, before gguf's tables are asked
    stacked: bool = False  # experts are one by one in the source
    by_model_names: bool = False  # what is fused or stacked in the source is so no longer, or no more, in the file
    plain_keys: Callable[[Config], dict[str, Any]] = lambda config: {}  # not below the architecture's name
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of config.json, that a user has to give
    called: str | None = None  # the architecture in files, where this gguf package does not know its name

    @property
    def name(self) -> str:
        return self.called or gguf.MODEL_ARCH_NAMES[self.arch]


def common(config: Config) -> dict[str, Any]:
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"]),
        **dict.fromkeys(("attention.key_length", "attention.value_length"), config.get("head_dim")),
    }
    return {key: value for key, value in found.items() if value is not None}


def like_llama(config: Config) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return common(config) | {
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope.freq_base": float(config.get("rope_theta", 1e4)),
        "rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1.0)),
    }


def mistral(config: Config) -> dict[str, Any]:
    return like_llama(config) | {"attention.sliding_window": config["sliding_window"]}


def mixtral(config: Config) -> dict[str, Any]:
    experts = {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    return like_llama({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config}) | experts


def qwen_moe(config: Config) -> dict[str, Any]:
    keys = like_llama(config) | {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }
    shared = config.get("shared_expert_intermediate_size")
    return keys | ({} if shared is None else {"expert_shared_feed_forward_length": shared})


def gemma3(config: Config) -> dict[str, Any]:
    return like_llama(config) | {
        "attention.scale": config["query_pre_attn_scalar"] ** -0.5,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": config["sliding_window_pattern"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.scaling.type": "linear",
        "rope.scaling.factor": config["rope_scaling"]["factor"],
    }


def chatglm(config: Config) -> dict[str, Any]:
    """Checkpoints with keys of their own; other names are `glm`."""
    return {
        "block_count": config["num_layers"],
        "context_length": config["seq_length"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["ffn_hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["multi_query_group_num"],
        "attention.layer_norm_rms_epsilon": config["layernorm_epsilon"],
        # No published model's heads have another size than hidden size over heads, which is all that converters write.
        **dict.fromkeys(("attention.key_length", "attention.value_length"), config["kv_channels"]),
        "rope.dimension_count": config["kv_channels"] // 2,
        "rope.freq_base": 10000.0 * config["rope_ratio"],
    }


def gemma2(config: Config) -> dict[str, Any]:
    return like_llama(config) | {
        "attention.scale": config["query_pre_attn_scalar"] ** -0.5,
        "attention.sliding_window": config["sliding_window"],
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def gemma_of_layers(config: Config) -> dict[str, Any]:
    """The Gemmas with embeddings for each layer."""
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.shared_kv_layers": config.get("num_kv_shared_layers", 0),
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config.get("final_logit_softcapping", 30.0),
    }


def gemma3n(config: Config) -> dict[str, Any]:
    cutoffs = [NormalDist().inv_cdf(part) if part else -np.inf for part in config["activation_sparsity_pattern"]]
    inner = config["intermediate_size"]
    return (
        like_llama({"rope_theta": 1e6, **config})
        | gemma_of_layers(config)
        | {
            "feed_forward_length": [inner] * config["num_hidden_layers"],
            "rope.scaling.type": "linear",
            "rope.scaling.factor": config["rope_scaling"]["factor"],
            "altup.active_idx": config.get("altup_active_idx", 0),
            "altup.num_inputs": config.get("altup_num_inputs", 4),
            "activation_sparsity_scale": cutoffs,
        }
    )


def stacked_projections(config: Config, folder: Path = GOLDEN / "gemma3n") -> dict[str, np.ndarray]:
    tensors = open_checkpoint(folder).tensors
    stems = {"altup_proj": "projections", "altup_unembd_proj": "unembed_projections"}
    return {
        f"{stem}.weight": np.stack([tensors[f"model.altup.{module}.{i}.weight"].read(F32) for i in range(3)])
        for stem, module in stems.items()
    }


def gemma4(config: Config) -> dict[str, Any]:
    full = [kind == "full_attention" for kind in config["layer_types"]]
    heads, of_full = config["num_key_value_heads"], config.get("num_global_key_value_heads")
    shared, inner = config.get("num_kv_shared_layers", 0), config["intermediate_size"]
    keys = (
        like_llama({"rope_theta": 1e6, **config})
        | gemma_of_layers(config)
        | {
            **dict.fromkeys(("attention.key_length", "attention.value_length"), config["global_head_dim"]),
            **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), config["head_dim"]),
            "rope.dimension_count": config["global_head_dim"],
            "rope.dimension_count_swa": config["head_dim"],
            "rope.freq_base_swa": 1e4,
        }
    )
    if config.get("use_double_wide_mlp"):
        count = config["num_hidden_layers"]
        keys["feed_forward_length"] = [inner * (1 + (i >= count - shared)) for i in range(count)]
    if of_full is not None:
        keys["attention.head_count_kv"] = [of_full if one else heads for one in full]
    if config.get("enable_moe_block"):
        keys |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["top_k_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return keys


def quarter_turned(config: Config) -> dict[str, np.ndarray]:
    half = config["global_head_dim"] // 2
    return {"rope_freqs.weight": np.array([1.0] * (half // 4) + [1e30] * (half - half // 4), F32)}


def with_router_scales(config: Config) -> dict[str, np.ndarray]:
    stored = stored_tensors(GOLDEN / "gemma4-experts")
    names = {"ffn_gate_inp": "scale", "ffn_down_exps": "per_expert_scale"}
    return quarter_turned(config) | {
        f"blk.{i}.{stem}.scale": stored[f"model.layers.{i}.router.{name}"].read(F32)
        for i in range(config["num_hidden_layers"])
        for stem, name in names.items()
    }


def without(*ends: str) -> Callable[[str, np.ndarray, Config], dict[str, np.ndarray]]:
    """Tensors but for those whose names hold one of ``ends``, which are ``extra``."""
    return lambda name, values, config: {} if any(end in name for end in ends) else {name: values}


def granite(config: Config) -> dict[str, Any]:
    return like_llama(config) | {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def yarn(config: Config) -> dict[str, Any]:
    scaling = config["rope_scaling"]
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
    }


def olmo2(config: Config) -> dict[str, Any]:
    keys = like_llama(config) | {"attention.layer_norm_rms_epsilon": 1e-5}
    if "sliding_window" not in config:
        return keys
    factor = config["rope_scaling"]["attention_factor"] / (1 + 0.1 * np.log(config["rope_scaling"]["factor"]))
    windows = {"attention.sliding_window": config["sliding_window"], "rope.scaling.attn_factor": float(factor)}
    return keys | yarn(config) | windows | {"attention.sliding_window_pattern": [True, True, True, False]}


def olmoe(config: Config) -> dict[str, Any]:
    experts = {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
    return like_llama(config) | {"attention.layer_norm_rms_epsilon": 1e-5} | experts


def glm(config: Config) -> dict[str, Any]:
    return like_llama(config) | {"attention.layer_norm_rms_epsilon": 1.5625e-7}


def cohere(config: Config) -> dict[str, Any]:
    keys = {"attention.layer_norm_epsilon": 1e-5, "logit_scale": config["logit_scale"], "rope.scaling.type": "none"}
    if "sliding_window" in config:
        return common(config) | keys | {"attention.sliding_window": config["sliding_window"], "vocab_size": 96}
    return common(config) | keys | {"rope.freq_base": 500000.0}


def exaone(config: Config) -> dict[str, Any]:
    own = {"num_hidden_layers": config["num_layers"], "rms_norm_eps": config["layer_norm_epsilon"]}
    return like_llama({**config, **own})


def exaone4(config: Config) -> dict[str, Any]:
    keys = {"attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": config["sliding_window"]}
    return like_llama(config) | keys | {"attention.sliding_window_pattern": [True, True, True, False]}


def gpt_oss(config: Config) -> dict[str, Any]:
    return like_llama({**config, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}) | {
        "attention.sliding_window": config["sliding_window"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }


def many_experts(config: Config) -> dict[str, Any]:
    """Families with DeepSeek's keys; some files leave out what is as readers assume."""
    return like_llama(config) | {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
    }


def dots1(config: Config) -> dict[str, Any]:
    return many_experts(config) | {"expert_weights_norm": True}


def glm4_moe(config: Config) -> dict[str, Any]:
    keys = many_experts({"rms_norm_eps": 1e-5, **config}) | {"expert_weights_norm": True, "expert_gating_func": 2}
    # With a layer more, which guesses further tokens.
    return keys | {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}


def further_layer(config: Config) -> dict[str, np.ndarray]:
    layer, size = f"blk.{config['num_hidden_layers']}", config["hidden_size"]
    found = dict.fromkeys((f"{layer}.attn_norm.weight", f"{layer}.nextn.enorm.weight"), np.ones(size, F32))
    return found | {f"{layer}.nextn.eh_proj.weight": np.ones((size, 2 * size), F32)}


def ernie(config: Config) -> dict[str, Any]:
    return like_llama({"rms_norm_eps": 1e-5, "rope_theta": 500000.0, **config})


def ernie_moe(config: Config) -> dict[str, Any]:
    return ernie(config) | {
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "interleave_moe_layer_step": 1,
    }


def hunyuan(config: Config) -> dict[str, Any]:
    scaling, size = config.get("rope_scaling"), config["head_dim"]
    theta = 10000.0 if scaling is None else 10000.0 * scaling["alpha"] ** (size / (size - 2))
    keys = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 262144}
    return like_llama({"rms_norm_eps": 1e-5, **config, "rope_theta": theta}) | ({} if scaling is None else keys)


def hunyuan_moe(config: Config) -> dict[str, Any]:
    inner = config["intermediate_size"]
    return hunyuan(config) | {
        "expert_count": config["num_experts"],
        "expert_used_count": config["moe_topk"],
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": inner,
        "expert_shared_count": 1,
    }


def granite_moe(config: Config) -> dict[str, Any]:
    keys = {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    if "shared_intermediate_size" in config:
        keys["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    return granite(config) | keys


def minimax_m2(config: Config) -> dict[str, Any]:
    return like_llama({"rope_theta": 5e6, **config}) | {
        "rope.dimension_count": config["rotary_dim"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2,
    }


def minicpm(config: Config) -> dict[str, Any]:
    return like_llama(config) | {
        "embedding_scale": float(config["scale_emb"]),
        "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logit_scale": config["hidden_size"] / config["dim_model_base"],
    }


def one_more(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    return values + 1 if name.endswith("norm.weight") else values


def one_row(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    return values[0] if name.endswith("shared_expert_gate.weight") else values


def permuted(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    """Rows of queries and keys as they are rotated in neighboring pairs."""
    count = config["num_attention_heads"]
    heads = {"q_proj": count, "k_proj": config.get("num_key_value_heads", count)}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return values
    return values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def starcoder2(config: Config) -> dict[str, Any]:
    return common(config) | {
        "attention.layer_norm_epsilon": config.get("norm_epsilon", 1e-5),
        "rope.freq_base": config.get("rope_theta", 1e4),
        **({"attention.sliding_window": config["sliding_window"]} if config["sliding_window"] else {}),
    }


def rotary_size(config: Config, default: float) -> int:
    size = config["hidden_size"] // config["num_attention_heads"]
    return int(size * config.get("partial_rotary_factor", default))


def phi2(config: Config) -> dict[str, Any]:
    return common(config) | {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": rotary_size(config, 0.5)}


def phi3(config: Config) -> dict[str, Any]:
    original, longest = config["original_max_position_embeddings"], config["max_position_embeddings"]
    return common(config) | {
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": config["sliding_window"] or 0,
        "rope.dimension_count": rotary_size(config, 1.0),
        "rope.freq_base": 10000.0,
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(longest / original) / np.log(original))),
    }


def own_keys(config: Config) -> dict[str, Any]:
    """A family with names of its own for them."""
    names = {
        "block_count": ("n_layer", "n_layers", "num_hidden_layers"),
        "context_length": ("n_positions", "seq_length", "max_seq_len", "max_position_embeddings"),
        "embedding_length": ("n_embd", "n_embed", "d_model", "hidden_size"),
        "attention.head_count": ("n_head", "n_heads", "num_attention_heads"),
    }
    found = {key: next(config[name] for name in own if name in config) for key, own in names.items()}
    inner = config.get("n_inner") or config.get("ffn_hidden_size") or 4 * found["embedding_length"]
    return found | {"feed_forward_length": inner, "attention.layer_norm_epsilon": 1e-5}


def stablelm(config: Config) -> dict[str, Any]:
    return common(config) | {
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": rotary_size(config, 0.25),
        "use_parallel_residual": config.get("use_parallel_residual", True),  # as the converter says of the others
    }


def gptneox(config: Config) -> dict[str, Any]:
    size = config["hidden_size"] // config["num_attention_heads"]
    return common(config) | {
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": int(config["rotary_pct"] * size),
        "rope.freq_base": float(config.get("rotary_emb_base", 10000)),
        "use_parallel_residual": config.get("use_parallel_residual", True),
    }


def starcoder(config: Config) -> dict[str, Any]:
    return own_keys(config) | {"attention.head_count_kv": 1}


def falcon(config: Config) -> dict[str, Any]:
    return own_keys(config) | {
        "attention.head_count_kv": config.get("num_kv_heads", 1),
        "tensor_data_layout": "jploski",
    }


def bloom(config: Config) -> dict[str, Any]:
    return own_keys(config) | {"attention.head_count_kv": config["n_head"]}


def mpt(config: Config) -> dict[str, Any]:
    clip = config["attn_config"]["clip_qkv"]
    return own_keys(config) | {"attention.clamp_kqv": clip, "attention.max_alibi_bias": 8.0}


def transposed(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    return values.T if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) else values


def in_turn(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    """Rows of queries, keys and values, which follow each other group by group, put in turn."""
    if "query_key_value" not in name:
        return values
    heads = config.get("n_head") or config["num_attention_heads"]
    groups = config.get("num_kv_heads") or (1 if config["model_type"] == "falcon" else heads)
    size = len(values) // (heads + 2 * groups)
    split = values.reshape(groups, heads // groups + 2, size, *values.shape[1:])
    parts = (split[:, :-2], split[:, -2], split[:, -1])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def phi3_factors(config: Config) -> dict[str, np.ndarray]:
    scaling = config["rope_scaling"]
    return {f"rope_factors_{kind}.weight": np.array(scaling[f"{kind}_factor"], F32) for kind in ("long", "short")}


def latent(config: Config) -> dict[str, Any]:
    """Keys of heads as files with one up-projection have them."""
    whole = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    ranks = {"attention.q_lora_rank": config.get("q_lora_rank"), "attention.kv_lora_rank": config["kv_lora_rank"]}
    return like_llama({"rms_norm_eps": 1e-6, **config, "head_dim": whole}) | {
        "rope.dimension_count": config["qk_rope_head_dim"],
        "attention.value_length": config["v_head_dim"],
        **{key: value for key, value in ranks.items() if value is not None},
    }


def minicpm3(config: Config) -> dict[str, Any]:
    return latent({"rms_norm_eps": 1e-5, **config})


def deepseek2(config: Config) -> dict[str, Any]:
    keys = latent(config) | many_experts({"rms_norm_eps": 1e-6, **config}) | latent(config)
    keys |= {"expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1}
    if config.get("n_group", 1) > 1:
        keys |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if config.get("norm_topk_prob"):
        keys["expert_weights_norm"] = True
    if scaling := config.get("rope_scaling"):
        keys |= yarn(config) | {"rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale"]}
    return keys


def deepseek2_absorbed(config: Config) -> dict[str, Any]:
    """Keys of newer files: sizes as kernels see them, and those of heads beside."""
    rank, keys = config["kv_lora_rank"], deepseek2(config)
    return keys | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + config["qk_rope_head_dim"],
        "attention.value_length": rank,
        "attention.key_length_mla": keys["attention.key_length"],
        "attention.value_length_mla": config["v_head_dim"],
    }


def up_projections(name: str, values: np.ndarray, config: Config) -> dict[str, np.ndarray]:
    if "kv_b_proj" not in name:
        return {name: values}
    by_head = values.reshape(config["num_attention_heads"], -1, values.shape[1])
    of_keys = by_head[:, : config["qk_nope_head_dim"]].swapaxes(1, 2)
    return {
        name.replace("kv_b_proj", "k_b_proj"): of_keys,
        name.replace("kv_b_proj", "v_b_proj"): by_head[:, config["qk_nope_head_dim"] :],
    }


def phimoe(config: Config) -> dict[str, Any]:
    experts = {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    keys = phi3({"sliding_window": None, **config}) | {
        "rope.scaling.attn_factor": config["rope_scaling"]["long_mscale"]
    }
    return keys | experts


def dbrx(config: Config) -> dict[str, Any]:
    attention, experts = config["attn_config"], config["ffn_config"]
    return own_keys(config) | {
        "feed_forward_length": experts["ffn_hidden_size"],
        "attention.head_count_kv": attention["kv_n_heads"],
        "rope.freq_base": attention["rope_theta"],
        "attention.clamp_kqv": attention["clip_qkv"],
        "expert_count": experts["moe_num_experts"],
        "expert_used_count": experts["moe_top_k"],
    }


def dbrx_experts(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    if ".experts." not in name:
        return values
    split = values.reshape(config["ffn_config"]["moe_num_experts"], -1, values.shape[1])
    return split.swapaxes(1, 2) if name.endswith("w2") else split


def llama4(config: Config) -> dict[str, Any]:
    return like_llama({"rms_norm_eps": 1e-5, **config}) | {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "vocab_size": config["vocab_size"],
    }


def state_space(config: Config) -> dict[str, Any]:
    def of(*names: str) -> Any:
        return next(config[name] for name in names if name in config)

    heads = of("mamba_n_heads", "mamba_num_heads", "num_heads")
    return {
        "ssm.conv_kernel": config.get("mamba_d_conv", config.get("conv_kernel", 4)),
        "ssm.inner_size": heads * of("mamba_d_head", "mamba_head_dim", "head_dim"),
        "ssm.state_size": of("mamba_d_state", "ssm_state_size", "state_size"),
        "ssm.time_step_rank": heads,
        "ssm.group_count": of("mamba_n_groups", "n_groups"),
    }


def mamba2(config: Config) -> dict[str, Any]:
    return state_space(config) | {
        "context_length": 2**20,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config["num_hidden_layers"],
        "attention.layer_norm_rms_epsilon": 1e-5,
    }


def state_space_changes(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    if name.endswith("conv1d.weight"):
        return values[:, 0]
    if name.endswith("A_log"):
        return -np.exp(values[:, None])
    if name.endswith(".D"):
        return values[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return values.reshape(state_space(config)["ssm.group_count"], -1)
    return permuted(name, values, config) if config["model_type"] in ("granitemoehybrid", "bamba") else values


def granite4(config: Config) -> dict[str, Any]:
    kv_heads = [config["num_key_value_heads"] * (kind == "attention") for kind in config["layer_types"]]
    keys = granite_moe(config) | state_space(config)
    return keys | {"attention.head_count_kv": kv_heads, "rope.scaling.finetuned": False}


def bamba(config: Config) -> dict[str, Any]:
    full = [i in config["attn_layer_indices"] for i in range(config["num_hidden_layers"])]
    return like_llama({"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, **config}) | {
        **state_space(config),
        "attention.head_count_kv": [config["num_key_value_heads"] * one for one in full],
        "rope.scaling.finetuned": True,
    }


def falcon_h1(config: Config) -> dict[str, Any]:
    inner = {"ssm.inner_size": config["mamba_d_ssm"], "vocab_size": config["vocab_size"]}
    return like_llama({"rms_norm_eps": 1e-5, **config}) | state_space(config) | inner


def falcon_h1_changes(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    values = state_space_changes(name, values, config).astype(np.float32)
    given, of_gate = config.get("attention_in_multiplier", 1.0), config.get("mlp_multipliers", (1.0, 1.0))
    factors = {
        "down_proj": of_gate[1],
        "gate_proj": of_gate[0],
        "k_proj": given * config.get("key_multiplier", 1.0),
        "q_proj": given,
        "v_proj": given,
        "o_proj": config.get("attention_out_multiplier", 1.0),
        "out_proj": config.get("ssm_out_multiplier", 1.0),
        "lm_head": config.get("lm_head_multiplier", 1.0),
        "embed_tokens": config.get("embedding_multiplier", 1.0),
    }
    if ".mamba.in_proj" in name:
        groups = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (config["mamba_d_ssm"], config["mamba_d_ssm"], groups, groups, config["mamba_n_heads"])
        parts = np.repeat(config.get("ssm_multipliers", [1.0] * 5), sizes).astype(np.float32)
        parts = parts.reshape(-1, *(1,) * (values.ndim - 1))
        return values * parts * np.float32(config.get("ssm_in_multiplier", 1.0) if values.ndim == 2 else 1.0)
    module = name.split(".")[-2]
    return values * np.float32(factors.get(module, 1.0))


def nemotron_h(config: Config) -> dict[str, Any]:
    pattern = config["hybrid_override_pattern"]
    return (
        common(config)
        | state_space(config)
        | {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "*") for kind in pattern],
            "feed_forward_length": [config["intermediate_size"] * (kind == "-") for kind in pattern],
        }
    )


def nemotron_h_moe(config: Config) -> dict[str, Any]:
    pattern = config["hybrid_override_pattern"].replace("E", "-")
    dense = {**config, "hybrid_override_pattern": pattern, "intermediate_size": config["moe_intermediate_size"]}
    return nemotron_h(dense) | {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "moe_latent_size": config["moe_latent_size"],
    }


def delta_net(config: Config) -> dict[str, Any]:
    keys = like_llama(config) | {
        "ssm.conv_kernel": config.get("linear_conv_kernel_dim", 4),
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": 4,
    }
    if "num_experts" in config:
        keys |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }
    return keys


def qwen35(config: Config) -> dict[str, Any]:
    return delta_net(config) | {"rope.dimension_sections": [11, 11, 10, 0]}


def qwen35_listed(config: Config) -> dict[str, Any]:
    """Where config.json lists the kinds of layers."""
    return qwen35(config) | {"attention.recurrent_layers": [True, True, True, False]}


def delta_net_changes(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    if name.endswith("conv1d.weight"):
        return values[:, 0]
    if name.endswith("A_log"):
        return -np.exp(values)
    return values if name.endswith("linear_attn.norm.weight") else one_more(name, values, config)


def first_value_heads_first(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    """Value heads of different key heads take turns."""
    values = delta_net_changes(name, values, config)
    keys, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    before = 2 * keys * config["linear_key_head_dim"]

    def turned(rows: np.ndarray, size: int) -> np.ndarray:
        split = rows.reshape(keys, -1, size, *rows.shape[1:])
        return split.swapaxes(0, 1).reshape(rows.shape)

    if "linear_attn" not in name or name.endswith("linear_attn.norm.weight"):
        return values
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([values[:before], turned(values[before:], size)])
    if "out_proj" in name:
        return turned(values.T, size).T
    return turned(values, size if "in_proj_z" in name else 1)


def queries_to_gates_apart(name: str, values: np.ndarray, config: Config) -> dict[str, np.ndarray]:
    """What is fused key head by key head, in turn: queries, keys and values, and gates."""
    if "in_proj_qkvz" not in name:
        return {name: values}
    keys, key, value = (config[f"linear_{part}"] for part in ("num_key_heads", "key_head_dim", "value_head_dim"))
    by_head = values.reshape(keys, -1, values.shape[1])
    values_end = 2 * key + config["linear_num_value_heads"] // keys * value
    parts = np.split(by_head, [key, 2 * key, values_end], axis=1)
    q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
    return {
        name.replace("in_proj_qkvz", "in_proj_qkv"): np.concatenate([q, k, v]),
        name.replace("in_proj_qkvz", "in_proj_z"): z,
    }


def lfm2(config: Config) -> dict[str, Any]:
    kv_heads = [config["num_key_value_heads"] * (kind != "conv") for kind in config["layer_types"]]
    return like_llama({"rms_norm_eps": 1e-5, **config}) | {
        "attention.head_count_kv": kv_heads,
        "feed_forward_length": 48,  # of the 60 that config.json has, by a rule
        "shortconv.l_cache": config["conv_L_cache"],
        "vocab_size": config["vocab_size"],
    }


def lfm2_moe(config: Config) -> dict[str, Any]:
    return lfm2(config) | {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
    }


def without_middle(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    return values[:, 0] if name.endswith("conv.conv.weight") else values


DEEPSEEK_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LFM2: dict[str, Any] = {
    "renamed": {"model.norm": "model.embedding_norm"},
    "by_model_names": True,
    "changed": without_middle,
}
# Files of Baichuan 7B have the same name, and are told by their size.
BAICHUAN_OF_ANY_SIZE = {"architectures": ["BaiChuanForCausalLM"]}
PHI3 = Conversion(gguf.MODEL_ARCH.PHI3, phi3, extra=phi3_factors)


def arcee(config: Config) -> dict[str, Any]:
    return like_llama({"rms_norm_eps": 1e-5, **config})


def olmo(config: Config) -> dict[str, Any]:
    keys = {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config["clip_qkv"]}
    return common(config) | keys | {"rope.freq_base": 10000.0}


def nemotron(config: Config) -> dict[str, Any]:
    eps = dict.fromkeys(("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"), 1e-5)  # norm_eps is both
    keys = {**eps, "rope.dimension_count": 6, "rope.scaling.type": "none", "rope.freq_base": 10000.0}
    return common(config) | keys


def ministral3(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return like_llama({"rms_norm_eps": 1e-5, **config, "rope_theta": rope["rope_theta"]}) | {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def glm4_moe_lite(config: Config) -> dict[str, Any]:
    known = {"rms_norm_eps": 1e-5, "norm_topk_prob": True, **config}
    keys = deepseek2_absorbed({**known, "model_type": "deepseek_v3"}) | {"attention.layer_norm_rms_epsilon": 1e-5}
    return {key: value for key, value in keys.items() if key != "expert_gating_func"}  # config.json does not say it


def indexed(config: Config) -> dict[str, Any]:
    types = config.get("indexer_types")
    known = {"rms_norm_eps": 1e-6, "norm_topk_prob": True, "routed_scaling_factor": 2.5, **config}
    return deepseek2_absorbed({**known, "model_type": "deepseek_v3"}) | {
        "attention.layer_norm_rms_epsilon": 1e-5 if config["model_type"] == "glm_moe_dsa" else 1e-6,
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        **({"attention.indexer.types": [kind == "full" for kind in types]} if types else {}),
    }


def channels(config: Config) -> dict[str, Any]:
    """State spaces of channels."""
    size = config["hidden_size"]
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * size,
        "ssm.state_size": config.get("mamba_d_state", config.get("state_size")),
        "ssm.time_step_rank": config.get("time_step_rank", size // 16),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-5),
    }


def mamba(config: Config) -> dict[str, Any]:
    return channels(config) | {
        "context_length": 2**20,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config["num_hidden_layers"],
        "ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba",
    }


def jamba(config: Config) -> dict[str, Any]:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    attends = [i % period == offset for i in range(config["num_hidden_layers"])]
    experts = {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
    keys = common(config) | channels({"rms_norm_eps": 1e-6, **config}) | experts
    return keys | {"attention.head_count_kv": [config["num_key_value_heads"] * one for one in attends]}


def channel_changes(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    if name.endswith("conv1d.weight"):
        return values[:, 0]
    return -np.exp(values) if name.endswith("A_log") else values


def bitnet(config: Config) -> dict[str, Any]:
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0, "hidden_activation": "relu2"}
    return like_llama({"rms_norm_eps": 1e-5, **config}) | keys


def kimi_linear(config: Config) -> dict[str, Any]:
    experts = {"first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "n_routed_experts": config["num_experts"]}
    kv_heads = [int(kind == "full_attention") for kind in config["layer_types"]]
    rank, whole = config["kv_lora_rank"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return many_experts({"rms_norm_eps": 1e-5, **experts, **config}) | {
        "rope.dimension_count": config["qk_rope_head_dim"],
        "attention.head_count_kv": kv_heads,
        "attention.key_length": rank + config["qk_rope_head_dim"],
        "attention.value_length": config["hidden_size"] // config["num_attention_heads"],
        "attention.key_length_mla": whole,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "expert_gating_func": 2,
        "kda.head_dim": config["linear_head_dim"],
        "ssm.conv_kernel": 4,
        "vocab_size": config["vocab_size"],
    }


def kimi_linear_changes(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    if name.endswith("conv1d.weight"):
        return values[None].reshape(1, len(values), 1, -1)
    return -np.exp(values) if name.endswith("A_log") else values


def apertus(config: Config) -> dict[str, Any]:
    return like_llama({"rms_norm_eps": 1e-5, **config})


def apertus_factors(config: Config) -> dict[str, np.ndarray]:
    (rope,) = open_checkpoint(GOLDEN / "apertus").model_config().ropes
    plain = config["rope_theta"] ** (-np.arange(0, 8, 2) / 8)
    return {"rope_freqs.weight": (plain / np.array(rope.inv_freq)).astype(F32)}


def xielu(config: Config) -> dict[str, Any]:
    stored = open_checkpoint(GOLDEN / "apertus").tensors
    return {
        f"xielu.{name}": [
            float(stored[f"model.layers.{i}.mlp.act_fn.{name}"].read(F32).ravel()[0])
            for i in range(config["num_hidden_layers"])
        ]
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    }


INDEXED = Conversion(
    gguf.MODEL_ARCH.GLM_DSA,
    indexed,
    parts=up_projections,
    renamed={".indexer.": ".self_attn.indexer."},
    by_model_names=True,
)
GEMMA4 = Conversion(
    gguf.MODEL_ARCH.GEMMA4, gemma4, extra=quarter_turned, renamed={"layer_scalar": "layer_scalar.weight"}
)
LLAMA = Conversion(gguf.MODEL_ARCH.LLAMA, like_llama, permuted)
CONVERSIONS = {
    "llama": LLAMA,
    "llama-bias": LLAMA,
    "mistral": replace(LLAMA, keys=mistral),
    "mixtral": replace(LLAMA, keys=mixtral, by_model_names=True),
    "mixtral-odd": replace(LLAMA, keys=mixtral, by_model_names=True),
    "yi": replace(LLAMA, differences={"architecture": "LlamaForCausalLM"}, by_model_names=True),
    "internlm3": replace(LLAMA, differences={"architecture": "LlamaForCausalLM"}),
    "qwen2": Conversion(gguf.MODEL_ARCH.QWEN2, like_llama, instead={"use_sliding_window": False}),
    "qwen2-moe": Conversion(gguf.MODEL_ARCH.QWEN2MOE, qwen_moe, one_row, by_model_names=True),
    "qwen3-moe": Conversion(gguf.MODEL_ARCH.QWEN3MOE, qwen_moe, by_model_names=True),
    "qwen3": Conversion(gguf.MODEL_ARCH.QWEN3, like_llama),
    "gemma3": Conversion(gguf.MODEL_ARCH.GEMMA3, gemma3, one_more),
    "chatglm": Conversion(gguf.MODEL_ARCH.CHATGLM, chatglm),
    "baichuan": Conversion(
        gguf.MODEL_ARCH.BAICHUAN, like_llama, permuted, by_model_names=True, overrides=BAICHUAN_OF_ANY_SIZE
    ),
    "starcoder2": Conversion(gguf.MODEL_ARCH.STARCODER2, starcoder2),
    "starcoder2-plain": Conversion(gguf.MODEL_ARCH.STARCODER2, starcoder2),
    "phi": Conversion(gguf.MODEL_ARCH.PHI2, phi2),
    "phi3": PHI3,
    "phi4-mini": PHI3,
    "stablelm-3b": Conversion(gguf.MODEL_ARCH.STABLELM, stablelm),
    "stablelm-2": Conversion(gguf.MODEL_ARCH.STABLELM, stablelm),
    "stablelm-2-12b": Conversion(gguf.MODEL_ARCH.STABLELM, stablelm),
    "gpt-neox": Conversion(gguf.MODEL_ARCH.GPTNEOX, gptneox, in_turn),
    "gpt-neox-in-turn": Conversion(gguf.MODEL_ARCH.GPTNEOX, gptneox, in_turn),
    "gpt2": Conversion(gguf.MODEL_ARCH.GPT2, own_keys, transposed),
    "gpt-bigcode": Conversion(gguf.MODEL_ARCH.STARCODER, starcoder),
    "falcon-7b": Conversion(gguf.MODEL_ARCH.FALCON, falcon, in_turn),
    "falcon-40b": Conversion(gguf.MODEL_ARCH.FALCON, falcon, in_turn),
    "falcon-11b": Conversion(gguf.MODEL_ARCH.FALCON, falcon, in_turn),
    "bloom": Conversion(gguf.MODEL_ARCH.BLOOM, bloom, in_turn),
    "mpt": Conversion(gguf.MODEL_ARCH.MPT, mpt),
    "gemma": Conversion(gguf.MODEL_ARCH.GEMMA, like_llama, one_more),
    "gemma2": Conversion(gguf.MODEL_ARCH.GEMMA2, gemma2, one_more),
    "gemma3n": Conversion(
        gguf.MODEL_ARCH.GEMMA3N,
        gemma3n,
        extra=stacked_projections,
        parts=without("altup_projections", "altup_unembed_projections"),
        renamed={"correct_output_scale": "correct_output_scale.weight"},
    ),
    "gemma4": GEMMA4,
    "gemma4-odd": GEMMA4,
    "gemma4-plain": GEMMA4,
    "gemma4-experts": replace(
        GEMMA4,
        extra=with_router_scales,
        parts=without("router.scale", "router.per_expert_scale"),
        renamed={
            **GEMMA4.renamed,
            "gate_up_proj": "gate_up_proj.weight",
            "experts.down_proj": "experts.down_proj.weight",
        },
    ),
    "arcee": Conversion(gguf.MODEL_ARCH.ARCEE, arcee, permuted),
    "olmo": Conversion(gguf.MODEL_ARCH.OLMO, olmo, permuted),
    "nemotron": Conversion(gguf.MODEL_ARCH.NEMOTRON, nemotron, one_more),
    "ministral3": Conversion(gguf.MODEL_ARCH.MISTRAL3, ministral3, permuted),
    "glm4-moe-lite": Conversion(
        gguf.MODEL_ARCH.DEEPSEEK2,
        glm4_moe_lite,
        parts=up_projections,
        differences={"architecture": "DeepseekV3ForCausalLM"},
        by_model_names=True,
    ),
    "smollm3": Conversion(gguf.MODEL_ARCH.SMOLLM3, like_llama, permuted),
    "granite": Conversion(gguf.MODEL_ARCH.GRANITE, granite, permuted),
    "olmo2": Conversion(gguf.MODEL_ARCH.OLMO2, olmo2),
    "olmo3": Conversion(gguf.MODEL_ARCH.OLMO2, olmo2),
    "olmoe": Conversion(gguf.MODEL_ARCH.OLMOE, olmoe, by_model_names=True),
    "glm": Conversion(gguf.MODEL_ARCH.CHATGLM, glm),
    "glm4": Conversion(gguf.MODEL_ARCH.GLM4, glm),
    "cohere": Conversion(gguf.MODEL_ARCH.COMMAND_R, cohere),
    "cohere2": Conversion(gguf.MODEL_ARCH.COHERE2, cohere),
    "internlm2": Conversion(gguf.MODEL_ARCH.INTERNLM2, like_llama, permuted, by_model_names=True),
    "exaone": Conversion(gguf.MODEL_ARCH.EXAONE, exaone),
    "exaone4": Conversion(gguf.MODEL_ARCH.EXAONE4, exaone4),
    "seed-oss": Conversion(gguf.MODEL_ARCH.SEED_OSS, like_llama),
    "gpt-oss": Conversion(gguf.MODEL_ARCH.GPT_OSS, gpt_oss, by_model_names=True),
    "deepseek-moe": Conversion(gguf.MODEL_ARCH.DEEPSEEK, many_experts, permuted, by_model_names=True),
    "dots1": Conversion(
        gguf.MODEL_ARCH.DOTS1,
        dots1,
        instead={"sliding_window": None, "max_window_layers": None},
        by_model_names=True,
    ),
    "glm4-moe": Conversion(gguf.MODEL_ARCH.GLM4_MOE, glm4_moe, extra=further_layer, by_model_names=True),
    "ernie4_5": Conversion(gguf.MODEL_ARCH.ERNIE4_5, ernie),
    "ernie4_5-moe": Conversion(gguf.MODEL_ARCH.ERNIE4_5_MOE, ernie_moe, by_model_names=True),
    "hunyuan": Conversion(gguf.MODEL_ARCH.HUNYUAN_DENSE, hunyuan, by_model_names=True),
    "hunyuan-moe": Conversion(gguf.MODEL_ARCH.HUNYUAN_MOE, hunyuan_moe, by_model_names=True),
    "granite-moe": Conversion(gguf.MODEL_ARCH.GRANITE_MOE, granite_moe, permuted, by_model_names=True),
    "granite-moe-shared": Conversion(gguf.MODEL_ARCH.GRANITE_MOE, granite_moe, permuted, by_model_names=True),
    "minimax-m2": Conversion(gguf.MODEL_ARCH.MINIMAXM2, minimax_m2, by_model_names=True),
    "minicpm": Conversion(gguf.MODEL_ARCH.MINICPM, minicpm, permuted),
    "baichuan-13b": Conversion(gguf.MODEL_ARCH.BAICHUAN, like_llama, permuted, by_model_names=True),
    "deepseek-v2": Conversion(gguf.MODEL_ARCH.DEEPSEEK2, deepseek2, by_model_names=True),
    "deepseek-v2-lite": Conversion(
        gguf.MODEL_ARCH.DEEPSEEK2,
        deepseek2,
        # One key says both, which are equal in all published models.
        instead={"rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        by_model_names=True,
    ),
    "deepseek-v3": Conversion(gguf.MODEL_ARCH.DEEPSEEK2, deepseek2_absorbed, parts=up_projections, by_model_names=True),
    "deepseek-v3-odd": Conversion(
        gguf.MODEL_ARCH.DEEPSEEK2,
        lambda config: deepseek2_absorbed({"routed_scaling_factor": 2.5, **config}),  # what a missing key means
        parts=up_projections,
        by_model_names=True,
    ),
    "deepseek-v32-sparse": replace(INDEXED, called="deepseek32"),
    "glm-moe-dsa": INDEXED,
    "glm-moe-dsa-shared": INDEXED,
    "kimi-linear": Conversion(
        gguf.MODEL_ARCH.KIMI_LINEAR, kimi_linear, kimi_linear_changes, parts=up_projections, by_model_names=True
    ),
    "bitnet": Conversion(
        gguf.MODEL_ARCH.BITNET,
        bitnet,
        renamed={"self_attn.attn_sub_norm": "self_attn.inner_attn_ln", "mlp.ffn_sub_norm": "mlp.ffn_layernorm"},
    ),
    "apertus": Conversion(
        gguf.MODEL_ARCH.APERTUS,
        apertus,
        extra=apertus_factors,
        parts=without(".act_fn."),
        plain_keys=xielu,
        by_model_names=True,
    ),
    **{
        name: Conversion(
            gguf.MODEL_ARCH.MAMBA,
            mamba,
            channel_changes,
            instead={"max_position_embeddings": 2**20},
            renamed={".mamba.": ".mixer.", "model.layers": "backbone.layers", "input_layernorm": "norm"},
            by_model_names=True,
        )
        for name in ("mamba", "falcon-mamba")
    },
    "jamba": Conversion(
        gguf.MODEL_ARCH.JAMBA,
        jamba,
        channel_changes,
        renamed={".mlp.": ".feed_forward.", "post_attention_layernorm": "pre_ff_layernorm"},
        by_model_names=True,
    ),
    "minicpm3": Conversion(
        gguf.MODEL_ARCH.MINICPM3, minicpm3, instead={"scale_emb": 12, "dim_model_base": 256}, by_model_names=True
    ),
    "phimoe": Conversion(
        gguf.MODEL_ARCH.PHIMOE, phimoe, extra=phi3_factors, instead={"router_jitter_noise": 0.01}, by_model_names=True
    ),
    "dbrx": Conversion(gguf.MODEL_ARCH.DBRX, dbrx, dbrx_experts),
    "llama4": Conversion(
        gguf.MODEL_ARCH.LLAMA4,
        llama4,
        instead={"attention_chunk_size": 8192, "floor_scale": 8192},
        by_model_names=True,
    ),
    "mamba2": Conversion(
        gguf.MODEL_ARCH.MAMBA2,
        mamba2,
        state_space_changes,
        instead={"max_position_embeddings": 2**20},
        by_model_names=True,
    ),
    "granite4": Conversion(gguf.MODEL_ARCH.GRANITE_HYBRID, granite4, state_space_changes, by_model_names=True),
    "bamba": Conversion(
        gguf.MODEL_ARCH.GRANITE_HYBRID,
        bamba,
        state_space_changes,
        instead={"time_step_limit": None},
        by_model_names=True,
    ),
    "nemotron-h": Conversion(
        gguf.MODEL_ARCH.NEMOTRON_H, nemotron_h, state_space_changes, instead={"time_step_min": 0.001}
    ),
    "nemotron-h-moe": Conversion(
        gguf.MODEL_ARCH.NEMOTRON_H_MOE,
        nemotron_h_moe,
        state_space_changes,
        stacked=True,
        # gguf's tables have no other name for its stacks.
        renamed={"backbone.layers.1.mlp": "model.layers.1.mlp", "backbone.layers.3.mlp": "model.layers.3.mlp"},
    ),
    "qwen3_5": Conversion(gguf.MODEL_ARCH.QWEN35, qwen35_listed, first_value_heads_first, by_model_names=True),
    "qwen3-odd": Conversion(gguf.MODEL_ARCH.QWEN3, like_llama),
    "qwen3_5-odd": Conversion(gguf.MODEL_ARCH.QWEN35, qwen35, first_value_heads_first, by_model_names=True),
    "qwen3_5-moe": Conversion(gguf.MODEL_ARCH.QWEN35MOE, qwen35, first_value_heads_first, by_model_names=True),
    "lfm2": Conversion(gguf.MODEL_ARCH.LFM2, lfm2, **LFM2),
    "lfm2-moe": Conversion(gguf.MODEL_ARCH.LFM2MOE, lfm2_moe, instead={"routed_scaling_factor": 1.0}, **LFM2),
    "qwen3-next": Conversion(gguf.MODEL_ARCH.QWEN3NEXT, delta_net, delta_net_changes, by_model_names=True),
}


# Whose factors the converter puts into weights: other numbers, and the same logits.
WITH_FACTORS = {
    name: Conversion(gguf.MODEL_ARCH.FALCON_H1, falcon_h1, falcon_h1_changes) for name in ("falcon-h1", "falcon-h1-odd")
}


def converted(name: str, path: Path, conversion: Conversion | None = None) -> Checkpoint:
    folder, conversion = GOLDEN / name, conversion or (CONVERSIONS | WITH_FACTORS)[name]
    config = open_checkpoint(folder).config
    keys = conversion.keys(config)
    names = gguf.get_tensor_name_map(conversion.arch, keys["block_count"])
    tensors = conversion.extra(config)
    stacks: dict[str, list[np.ndarray]] = {}
    stored_here = with_stacked_experts(stored_tensors(folder), folder) if conversion.stacked else stored_tensors(folder)
    source = open_checkpoint(folder).tensors if conversion.by_model_names else stored_here
    for stored, tensor in sorted(source.items()):
        if ".norms." in stored:  # which the converter stacks
            stacks.setdefault(stored.split(".norms.")[0] + ".weight", []).append(tensor.read(F32))
            continue
        for part, values in conversion.parts(stored, tensor.read(F32), config).items():
            tensors[_gguf_name(part, names, conversion)] = np.ascontiguousarray(
                conversion.changed(part, values, config)
            )
    for stored, vectors in stacks.items():
        new = names.get_name(stored, try_suffixes=(".weight",))
        assert new is not None, stored
        tensors[new] = np.stack(vectors)
    written = write(path / f"{name}.gguf", conversion.name, keys, tensors, conversion.plain_keys(config))
    return open_checkpoint(written, overrides=conversion.overrides)


def _gguf_name(stored: str, names: gguf.TensorNameMap, conversion: Conversion) -> str:
    # Without a suffix in the source, with one in the file.
    named = f"{stored}.weight" if stored.endswith((".sinks", ".w1", ".v1", ".w2")) else stored
    named = named.replace("e_score_correction_bias", "e_score_correction.bias").replace(".dt_bias", ".dt_proj.bias")
    for old, new in conversion.renamed.items():
        named = named.replace(old, new)
    found = names.get_name(named, try_suffixes=(".weight", ".bias"))
    found = found or names.get_name(stored.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
    # A dense layer among those with experts, which no published model of the architecture has.
    found = found or gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8).get_name(named, (".weight",))
    assert found is not None, stored
    return found


def comparable(model: ModelConfig, **differences: Any) -> ModelConfig:
    """Without what GGUF keeps among the tokenizer's keys, and the type of the original weights."""
    return replace(model, dtype=None, bos_token_id=None, eos_token_ids=(), **differences)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_gguf_of_a_family(name: str, tmp_path: Path) -> None:
    source, found = open_checkpoint(GOLDEN / name), converted(name, tmp_path)
    differences = CONVERSIONS[name].differences
    source = replace(source, config={**source.config, **CONVERSIONS[name].instead})
    expected, got = comparable(source.model_config(), **differences), comparable(found.model_config(), **differences)
    assert _rounded(got) == _rounded(expected)
    assert found.tensors.keys() == source.tensors.keys()
    for key, tensor in source.tensors.items():
        got_values, values = found.tensors[key].read(F32), tensor.read(F32)
        if key.endswith("A_log"):  # the logarithm of an exponential
            np.testing.assert_allclose(got_values, values, rtol=0, atol=1e-6, err_msg=key)
        else:
            np.testing.assert_array_equal(got_values, values, err_msg=key)


def _rounded(model: ModelConfig) -> ModelConfig:
    """With rope's frequencies and factors rounded to f32 and a little more: GGUF keeps f32."""

    def rope(own: Any) -> Any:
        if own is None:
            return None
        by = own.by_length
        if by is not None:
            by = replace(by, inv_freq=tuple(float(f"{x:.5e}") for x in by.inv_freq))
        inv_freq = tuple(float(f"{x:.5e}") for x in own.inv_freq)
        return replace(own, inv_freq=inv_freq, attention_factor=float(f"{own.attention_factor:.5e}"), by_length=by)

    layers = tuple(
        replace(
            one,
            mixer=one.mixer if one.mixer.rope is None else replace(one.mixer, rope=rope(one.mixer.rope)),
            residual=replace(one.residual, scale=float(f"{one.residual.scale:.6e}")),
        )
        for one in model.layers
    )
    return replace(model, layers=layers)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("position_embd.weight", "'position_embd.weight' is not supported"),
        ("blk.0.attn_qkv.bias", "'blk.0.attn_qkv.bias'"),
    ],
)
def test_what_mpt_is_not_supported_with(stored: str, message: str, tmp_path: Path) -> None:
    config = open_checkpoint(GOLDEN / "mpt").config
    tensors = {"token_embd.weight": np.zeros((96, 24), F32), "blk.0.attn_norm.weight": np.ones(24, F32)}
    keys = mpt(config) | {"block_count": 1}
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path / "model.gguf", "mpt", keys, tensors | {stored: np.ones((72,), F32)}))


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("dots1", "expert_weights_norm", [True, False], "differs from layer to layer"),
        ("dots1", "expert_weights_norm", 1, "is 1, neither true nor false"),
        ("falcon-mamba", "ssm.dt_b_c_rms", "yes", "is 'yes', neither true nor false"),
        ("granite4", "rope.scaling.finetuned", [True, False], "differs from layer to layer"),
        ("gemma2", "attention.scale", 0.0, "is 0, not a number above 0"),
        ("gemma3", "attention.scale", 0.0, "is 0, not a number above 0"),
        ("minicpm", "logit_scale", 0.0, "is 0, not a number above 0"),
        ("gemma4-plain", "feed_forward_length", ["a", "b"], "is a list of strings"),
        ("nemotron-h", "feed_forward_length", ["a", "b"], "is a list of strings"),
        ("qwen3_5", "attention.recurrent_layers", [False] * 4, "names other layers than those that have recurrent"),
        ("qwen3_5-odd", "ssm.group_count", 3, "is 7, not a multiple of ssm.group_count = 3"),
        ("qwen3_5-odd", "ssm.state_size", 2**31, "does not have 12 rows or columns for each of 7 heads of values"),
    ],
)
def test_keys_that_cannot_be_so(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    kind = CONVERSIONS[name]
    wrong = replace(kind, keys=lambda config: kind.keys(config) | {key: value})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        converted(name, tmp_path, wrong)


@pytest.mark.parametrize(("size", "rotated"), [(4096, True), (5120, False)])
def test_baichuan_is_rotated_by_its_size(size: int, rotated: bool, tmp_path: Path) -> None:
    """7B is, 13B has ALiBi; files of both have the same keys."""
    config = {**open_checkpoint(GOLDEN / "baichuan").config, "hidden_size": size, "num_attention_heads": size // 128}
    tensors = {"token_embd.weight": np.zeros((96, size), F32), "blk.0.attn_norm.weight": np.ones(size, F32)}
    keys = like_llama(config) | {"block_count": 1, "tensor_data_layout": "Meta AI original pth"}
    (layer,) = open_checkpoint(write(tmp_path / "model.gguf", "baichuan", keys, tensors)).model_config().layers
    assert (layer.mixer.rope is not None, layer.mixer.slopes is None) == (rotated, rotated)


def qwen3_next_apart(path: Path) -> Checkpoint:
    """The layout of newer files, in more tensors than the original."""
    return converted("qwen3-next", path, replace(CONVERSIONS["qwen3-next"], parts=queries_to_gates_apart))


@pytest.mark.parametrize(
    ("conversion", "make"),
    [
        ("qwen3-next", qwen3_next_apart),
        ("deepseek-v3", partial(converted, "deepseek-v3")),
        *(pytest.param(name, partial(converted, name), marks=pytest.mark.slow) for name in WITH_FACTORS),
    ],
)
def test_logits_of_files_with_other_tensors(
    conversion: str, make: Callable[[Path], Checkpoint], tmp_path: Path
) -> None:
    found = make(tmp_path)
    engine = Stepper(found.model_config(), {name: tensor.read(F32) for name, tensor in found.tensors.items()})
    with np.load(GOLDEN / conversion / "golden.npz") as case:
        tokens, at, expected = (case[f"long/{part}"] for part in ("tokens", "at", "logits"))
    logits = np.concatenate(engine.step([(engine.add(tokens), len(tokens))], bucket=48, rows=4))
    np.testing.assert_allclose(logits[at], expected, rtol=0, atol=2e-4)


def test_columns_of_quantized_matrices_that_the_converter_has_moved(packed: Any, tmp_path: Path) -> None:
    """Qwen3.5's value heads take turns in what ``out_proj`` is given."""
    config = {**open_checkpoint(GOLDEN / "qwen3_5").config, "linear_value_head_dim": 16}
    rng, name = np.random.default_rng(0), "model.layers.0.linear_attn.out_proj.weight"
    original = rng.standard_normal((32, 64)).astype(np.float32)
    stored = gguf.quants.quantize(first_value_heads_first(name, original, config), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen35")
    for key, value in qwen35(config).items():
        if isinstance(value, list):
            writer.add_array(f"qwen35.{key}", value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"qwen35.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((96, 32), F32))
    for layer in range(4):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(32, F32))
    writer.add_tensor("blk.0.ssm_out.weight", stored, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_checkpoint(tmp_path / "q.gguf").tensors[name]
    np.testing.assert_allclose(found.read(F32), original, rtol=0, atol=0.05)
    assert packed(found) is not None  # which compares what it stands for


def test_one_of_two_up_projections(tmp_path: Path) -> None:
    config = open_checkpoint(GOLDEN / "deepseek-v3").config
    tensors = {"token_embd.weight": np.zeros((96, 32), F32), "blk.0.attn_k_b.weight": np.zeros((4, 16, 12), F32)}
    keys = deepseek2_absorbed(config) | {"block_count": 1}
    path = write(tmp_path / "model.gguf", "deepseek2", keys, tensors)
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_v_b.weight' is missing, but 'blk.0.attn_k_b.weight' is"):
        open_checkpoint(path)
    path = write(
        tmp_path / "two.gguf", "deepseek2", keys, tensors | {"blk.0.attn_v_b.weight": np.zeros((3, 10, 16), F32)}
    )
    with pytest.raises(CheckpointError, match="are not keys and values of the same heads"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}),
        ("dots1", {"sliding_window": 9, "max_window_layers": 2}),
        ("llama4", {"attention_chunk_size": 8, "floor_scale": 8, "no_rope_layers": [0, 1, 1, 0]}),
    ],
)
def test_what_no_key_can_say_is_told_by_overrides(name: str, told: dict[str, Any], tmp_path: Path) -> None:
    """Such files have the same keys as others: docs/formats.md lists the fields, and what is taken for them."""
    config = open_checkpoint(GOLDEN / name).config | CONVERSIONS[name].instead | told
    found = converted(name, tmp_path, replace(CONVERSIONS[name], overrides=told))
    expected = replace(open_checkpoint(GOLDEN / name), config=config).model_config()
    assert _rounded(comparable(found.model_config())) == _rounded(comparable(expected))
    plain = converted(name, tmp_path).model_config()
    assert _rounded(comparable(plain)) != _rounded(comparable(expected))
    formats = (TESTS.parent / "docs" / "formats.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in formats for key in told)


def test_decays_that_no_model_has(tmp_path: Path) -> None:
    config = open_checkpoint(GOLDEN / "mamba2").config
    tensors = {"token_embd.weight": np.zeros((96, 32), F32), "blk.0.ssm_a": np.zeros((8, 1), F32)}
    found = open_checkpoint(write(tmp_path / "model.gguf", "mamba2", mamba2(config) | {"block_count": 1}, tensors))
    with pytest.raises(CheckpointError, match=r"'blk.0.ssm_a' holds a number that is not finite and below 0"):
        found.tensors["model.layers.0.mamba.A_log"].read(F32)


def test_kinds_of_layers_that_keys_do_not_agree_on(tmp_path: Path) -> None:
    config = open_checkpoint(GOLDEN / "nemotron-h").config
    tensors = {"token_embd.weight": np.zeros((96, 32), F32), "blk.0.attn_norm.weight": np.ones(32, F32)}
    keys = nemotron_h(config) | {"block_count": 1}
    with pytest.raises(CheckpointError, match=r"attention.head_count_kv' has 7 elements for 1 layers"):
        open_checkpoint(write(tmp_path / "model.gguf", "nemotron_h", keys, tensors))


def test_fused_gate_of_wrong_size(tmp_path: Path) -> None:
    config = open_checkpoint(GOLDEN / "phi4-mini").config
    tensors = {"token_embd.weight": np.zeros((96, 48), F32), "blk.0.ffn_up.weight": np.zeros((95, 48), F32)}
    path = write(tmp_path / "model.gguf", "phi3", phi3(config) | {"block_count": 1}, tensors | phi3_factors(config))
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' has 95 rows, not 96 for gate and up"):
        open_checkpoint(path)


def test_a_file_of_nothing_but_layers_that_guess_further_tokens(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": np.zeros((96, 24), F32), "blk.0.attn_norm.weight": np.ones(24, F32)}
    keys = {"block_count": 1, "nextn_predict_layers": 1}
    with pytest.raises(CheckpointError, match="nextn_predict_layers' leaves no layer of 1"):
        open_checkpoint(write(tmp_path / "some.gguf", "glm4moe", keys, tensors))


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_layers_that_guess_further_tokens_may_be_counted_and_left_out(tmp_path: Path, dropped: int) -> None:
    config = open_checkpoint(GOLDEN / "glm4-moe").config
    layers = config["num_hidden_layers"]
    tensors = {f"blk.{layer}.attn_norm.weight": np.ones(24, F32) for layer in range(layers + 1 - dropped)}
    tensors["token_embd.weight"] = np.zeros((96, 24), F32)
    file = GGUFFile.open(write(tmp_path / "some.gguf", "glm4moe", glm4_moe(config), tensors))
    if dropped < 2:
        assert hf_config(file)["num_hidden_layers"] == layers
        shown = inspect_model(file.path)  # what `llmjax inspect` shows, and what `llmjax generate` would load
        assert shown.problem is None and shown.model == open_checkpoint(file.path).model_config()
        assert shown.model.num_layers == layers
    else:
        assert inspect_model(file.path).problem is not None
        with pytest.raises(CheckpointError, match=f"block_count is {layers + 1}, but the tensors are of {layers - 1} "):
            hf_config(file)
