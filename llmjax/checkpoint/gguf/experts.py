"""Mixture-of-experts layers of GGUF files: converts keys of config.json in both directions."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.checkpoint.gguf.names import ROUTER, has_any
from llmjax.errors import CheckpointError
from llmjax.models import Experts, ModelConfig

NORMALIZED = MappingProxyType(
    {
        "MixtralForCausalLM": True,
        "OlmoeForCausalLM": False,
        "Qwen2MoeForCausalLM": False,
        "Qwen3MoeForCausalLM": True,
        "Qwen3NextForCausalLM": True,
        "Qwen3_5MoeForCausalLM": True,
    }
)
"""Whether llama.cpp normalizes the shares of a token's experts, which files need not say."""


def qwen_experts(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of config.json, under Qwen's names.

    Args:
        config: the keys of config.json so far.

    Raises:
        CheckpointError: a key is missing or asks for another router.
    """
    used, inner = keys.integer("expert_used_count"), config["intermediate_size"]
    normalize = NORMALIZED[config["architectures"][0]]
    _softmax_only(keys, normalize=normalize)
    found = {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": used,
        # Older files leave sizes out where they follow from the dense one.
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", inner // used),
        "norm_topk_prob": normalize,
        "mlp_only_layers": [i for i in range(config["num_hidden_layers"]) if not has_experts(gguf, i)],
    }
    if has_any(gguf.tensors, "ffn_up_shexp.weight"):
        found["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length", inner)
    return found


def mixtral_experts(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile) -> dict[str, Any]:
    """Keys of config.json, under Mixtral's names; empty if there are no experts.

    Raises:
        CheckpointError: a key is missing or asks for another router, or a layer has no experts.
    """
    if not keys.integer("expert_count", 0, least=0):
        return {}
    _softmax_only(keys, normalize=True)
    keys.only("expert_feed_forward_length", config["intermediate_size"])
    for layer in range(config["num_hidden_layers"]):
        if not has_experts(gguf, layer):
            raise CheckpointError(f"{gguf.path}: tensor 'blk.{layer}.{ROUTER}.weight' is missing")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def deepseek_experts(
    keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile, *, gating: int, normalize: bool
) -> dict[str, Any]:
    """Keys of config.json, under DeepSeek's names.

    Args:
        gating: required value of ``expert_gating_func``, if the file has it: 1 is softmax, 2 sigmoid.
        normalize: whether shares add up to one if the file does not say.

    Raises:
        CheckpointError: a key is missing or asks for another router.
    """
    keys.only("expert_gating_func", gating)
    keys.value("expert_shared_feed_forward_length", 0)  # follows from the others
    shared = keys.integer("expert_shared_count", 0, least=0)
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": shared or None,
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, least=0),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm", normalize),
    }


def same_experts(keys: ArchitectureKeys, config: dict[str, Any], gguf: GGUFFile, *, gating: int = 1) -> dict[str, Any]:
    """Keys of config.json where all layers have experts of the dense size, whose shares add up to one.

    Args:
        gating: as for `deepseek_experts`.

    Raises:
        CheckpointError: a key is missing or asks for another router.
    """
    keys.only("expert_gating_func", gating)
    keys.only("expert_weights_scale", 1.0)
    keys.only("expert_weights_norm", True)
    keys.only("expert_feed_forward_length", config["intermediate_size"])
    return {"num_local_experts": keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count")}


def expert_metadata(model: ModelConfig, path: Path) -> dict[str, Any]:
    """The keys below the architecture for a model's experts.

    Args:
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: keys cannot express the experts.
    """
    sparse = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Experts)]
    if not sparse:
        return {}
    experts = sparse[0]
    if experts.normalize != NORMALIZED[model.architecture]:
        raise CheckpointError(
            f"{path}: norm_topk_prob = {experts.normalize} of {model.architecture} cannot be written as GGUF"
        )
    if len(sparse) < model.num_layers:
        raise CheckpointError(f"{path}: layers with and without experts cannot be written as GGUF")
    keys = {"expert_count": experts.count, "expert_used_count": experts.per_token}
    if model.architecture != "MixtralForCausalLM":  # whose experts have the dense size; readers ask for it elsewhere
        keys["expert_feed_forward_length"] = experts.inner
    if experts.shared is not None:
        keys["expert_shared_feed_forward_length"] = experts.shared.inner
    return keys


def has_experts(gguf: GGUFFile, layer: int) -> bool:
    """Whether a layer has a router."""
    return f"blk.{layer}.{ROUTER}.weight" in gguf.tensors


def _softmax_only(keys: ArchitectureKeys, *, normalize: bool) -> None:
    keys.only("expert_gating_func", 1)
    keys.only("expert_weights_scale", 1.0)
    keys.only("expert_weights_norm", normalize)
