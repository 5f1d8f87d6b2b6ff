"""DeepSeek V2: latent attention, and groups of experts after the first layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, experts_per_token, gated_mlp, layer_types, rms
from llmjax.models.layers.latent import LatentAttention
from llmjax.models.layers.layer import FeedForward, LayerSpec
from llmjax.models.layers.moe import ExpertGroups, Experts, SharedExpert
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.rope_scaling import RopeLengths, of_whole_heads, resolve_rope, rope_parameters, yarn_gain

# What Hugging Face's DeepseekV2Config means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 102400,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
LATENT_EPS = 1e-6  # Hugging Face's norms of latent vectors do not read the config


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    kinds = layer_types(fields)
    if "sliding_attention" in kinds:
        raise fields.error("layer_types", "has windows, which latent attention does not")
    attention, norm = latent_attention(fields), rms(fields)
    layers = [LayerSpec(mixer=attention, feed_forward=each, norm=norm) for each in feed_forwards(fields, _experts)]
    return decoder_config(fields, layers=layers, norm=norm)


def feed_forwards(fields: Fields, experts: Callable[[Fields], Experts]) -> list[FeedForward]:
    """An MLP in each of the first layers, then experts.

    Args:
        experts: reads the keys about experts; not called if no layer has any.
    """
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    dense = min(count, fields.integer("first_k_dense_replace", minimum=0, maximum=MAX_LAYERS))
    step = fields.integer("moe_layer_freq") if "moe_layer_freq" in fields.defaults else 1
    sparse, mlp = experts(fields) if dense < count else None, gated_mlp(fields)
    return [mlp if sparse is None or i < dense or i % step else sparse for i in range(count)]


def latent_attention(fields: Fields, *, interleaved: bool = True) -> LatentAttention:
    """Latent attention from DeepSeek's keys; ``interleaved``: whether neighboring entries are rotated together."""
    heads, nope, turned = (
        fields.integer(key) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    if fields.optional_integer("num_key_value_heads") not in (None, heads):
        raise fields.error("num_key_value_heads", f"is not num_attention_heads = {heads}")
    lengths = RopeLengths(fields.integer("max_position_embeddings"), fields.max_model_len)
    keys = of_whole_heads(rope_parameters(fields, "full_attention"))
    scale = (nope + turned) ** -0.5
    if keys.get("rope_type") == "yarn" and keys.get("mscale_all_dim"):
        scale *= yarn_gain(keys.number("factor"), keys.number("mscale_all_dim")) ** 2
    return LatentAttention(
        heads=heads,
        q_rank=fields.optional_integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=turned,
        value_dim=fields.integer("v_head_dim"),
        scale=scale,
        rope=replace(resolve_rope(keys, head_dim=turned, lengths=lengths), interleaved=interleaved),
        norm=RMS(LATENT_EPS),
        bias=fields.flag("attention_bias"),
    )


def _experts(fields: Fields) -> Experts:
    # Hugging Face reads norm_topk_prob and does nothing with it.
    fields.require("norm_topk_prob", False)
    fields.require("scoring_func", "softmax")
    fields.require("moe_layer_freq", 1)
    limited = fields.choice("topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy"
    return routed_experts(fields, groups=expert_groups(fields, best=1) if limited else None, normalize=False)


def expert_groups(fields: Fields, *, best: int) -> ExpertGroups:
    """Groups of experts, of which each token uses some; ``best``: see `ExpertGroups`."""
    count, groups = fields.integer("n_routed_experts"), fields.integer("n_group")
    kept = fields.integer("topk_group")
    if count % groups:
        raise fields.error("n_group", f"does not divide n_routed_experts = {count}")
    if kept > groups:
        raise fields.error("topk_group", f"is more than there are groups, {groups}")
    if count // groups < best:
        raise fields.error("n_group", f"leaves {count // groups} of {count} experts in a group, less than {best}")
    return ExpertGroups(groups, kept, best)


def routed_experts(fields: Fields, *, groups: ExpertGroups | None, **differences: Any) -> Experts:
    """Experts from DeepSeek's keys, with shared ones that have no gate.

    Args:
        differences: other fields of Experts.
    """
    count = fields.integer("n_routed_experts")
    inner, shared = fields.integer("moe_intermediate_size"), fields.optional_integer("n_shared_experts", minimum=0)
    return Experts(
        count=count,
        per_token=experts_per_token(fields, count // groups.count * groups.kept if groups else count),
        inner=inner,
        activation=fields.choice("hidden_act", ACTIVATIONS),
        scaling=fields.number("routed_scaling_factor"),
        groups=groups,
        shared=SharedExpert(inner=inner * shared, name="shared_experts", gated=False) if shared else None,
        **differences,
    )


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("DeepseekV2ForCausalLM",), model_types=("deepseek_v2",)),)
