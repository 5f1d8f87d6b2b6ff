"""Golden checkpoints written as GGUF the way llama.cpp's converter does, with the names of the gguf package, are the
same models: equal configurations and, value by value, equal weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.errors import CheckpointError
from llmjax.models import ModelConfig
from tests.checkpoint.gguf.test_model import write

GOLDEN = Path(__file__).parents[2] / "models" / "golden"
F32 = np.dtype(np.float32)
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Conversion:
    """What the converter does to a family.

    Attributes:
        arch: of the gguf package.
        keys: those of the architecture, of a config.json.
        changed: a tensor by its name in the source as it is stored.
        differences: of the configuration that GGUF has no key for.
    """

    arch: gguf.MODEL_ARCH
    keys: Callable[[Config], dict[str, Any]]
    changed: Callable[[str, np.ndarray, Config], np.ndarray] = lambda name, values, config: values
    extra: Callable[[Config], dict[str, np.ndarray]] = lambda config: {}
    differences: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # keys of config.json that files do not keep
    by_model_names: bool = False  # what is fused or stacked in the source is so no longer, or no more, in the file


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


def gemma2(config: Config) -> dict[str, Any]:
    return like_llama(config) | {
        "attention.scale": config["query_pre_attn_scalar"] ** -0.5,
        "attention.sliding_window": config["sliding_window"],
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


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
    """Of families with DeepSeek's keys; some files leave out what is as readers assume."""
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
    """Of a family with names of its own for them."""
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


PHI3 = Conversion(gguf.MODEL_ARCH.PHI3, phi3, extra=phi3_factors)
CONVERSIONS = {
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
        gguf.MODEL_ARCH.DOTS1, dots1, without=("sliding_window", "max_window_layers"), by_model_names=True
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
}


def converted(name: str, path: Path) -> Checkpoint:
    folder, conversion = GOLDEN / name, CONVERSIONS[name]
    config = open_checkpoint(folder).config
    keys = conversion.keys(config)
    names = gguf.get_tensor_name_map(conversion.arch, keys["block_count"])
    tensors = conversion.extra(config)
    stacks: dict[str, list[np.ndarray]] = {}
    source = open_checkpoint(folder).tensors if conversion.by_model_names else stored_tensors(folder)
    for stored, tensor in sorted(source.items()):
        if ".norms." in stored:  # which the converter stacks
            stacks.setdefault(stored.split(".norms.")[0] + ".weight", []).append(tensor.read(F32))
            continue
        # Without a suffix in the source, with one in the file.
        named = f"{stored}.weight" if stored.endswith(".sinks") else stored
        named = named.replace("e_score_correction_bias", "e_score_correction.bias")
        new = names.get_name(named, try_suffixes=(".weight", ".bias"))
        new = new or names.get_name(stored.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
        assert new is not None, stored
        tensors[new] = np.ascontiguousarray(conversion.changed(stored, tensor.read(F32), config))
    for stored, vectors in stacks.items():
        new = names.get_name(stored, try_suffixes=(".weight",))
        assert new is not None, stored
        tensors[new] = np.stack(vectors)
    return open_checkpoint(write(path / f"{name}.gguf", gguf.MODEL_ARCH_NAMES[conversion.arch], keys, tensors))


def comparable(model: ModelConfig, **differences: Any) -> ModelConfig:
    """Without what GGUF keeps among the tokenizer's keys, and the type of the original weights."""
    return replace(model, dtype=None, bos_token_id=None, eos_token_ids=(), **differences)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_gguf_of_a_family(name: str, tmp_path: Path) -> None:
    source, found = open_checkpoint(GOLDEN / name), converted(name, tmp_path)
    differences = CONVERSIONS[name].differences
    kept = {key: value for key, value in source.config.items() if key not in CONVERSIONS[name].without}
    source = replace(source, config=kept | dict.fromkeys(CONVERSIONS[name].without))
    expected, got = comparable(source.model_config(), **differences), comparable(found.model_config(), **differences)
    assert _rounded(got) == _rounded(expected)
    assert found.tensors.keys() == source.tensors.keys()
    for key, tensor in source.tensors.items():
        np.testing.assert_array_equal(found.tensors[key].read(F32), tensor.read(F32), err_msg=key)


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
            mixer=replace(one.mixer, rope=rope(one.mixer.rope)),
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
