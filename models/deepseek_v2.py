"""DeepSeek V2: latent attention, and experts in groups behind the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, experts_per_token, gated_mlp, layer_types, rms
from llmjax.models.layers.latent import LatentAttention
from llmjax.models.layers.layer import LayerSpec
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


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("mlp_bias", False)
    kinds = layer_types(fields)
    if "sliding_attention" in kinds:
        raise fields.error("layer_types", "has windows, which latent attention does not")
    attention, norm = _attention(fields, max_model_len), rms(fields)
    dense = fields.integer("first_k_dense_replace", minimum=0, maximum=MAX_LAYERS)
    mlp = gated_mlp(fields)
    experts = _experts(fields) if dense < len(kinds) else None
    layers = [
        LayerSpec(mixer=attention, feed_forward=mlp if experts is None or i < dense else experts, norm=norm)
        for i in range(len(kinds))
    ]
    return decoder_config(fields, architecture="DeepseekV2ForCausalLM", layers=layers, norm=norm)


def _attention(fields: Fields, max_model_len: int | None) -> LatentAttention:
    heads, nope, turned = (
        fields.integer(key) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    if fields.optional_integer("num_key_value_heads") not in (None, heads):
        raise fields.error("num_key_value_heads", f"is not num_attention_heads = {heads}")
    lengths = RopeLengths(fields.integer("max_position_embeddings"), max_model_len)
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
        rope=replace(resolve_rope(keys, head_dim=turned, lengths=lengths), interleaved=True),
        norm=RMS(LATENT_EPS),
        bias=fields.flag("attention_bias"),
    )


def _experts(fields: Fields) -> Experts:
    # Hugging Face reads norm_topk_prob and does nothing with it.
    fields.require("norm_topk_prob", False)
    fields.require("scoring_func", "softmax")
    fields.require("moe_layer_freq", 1)
    count, groups = fields.integer("n_routed_experts"), None
    if fields.choice("topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy":
        groups = ExpertGroups(fields.integer("n_group"), fields.integer("topk_group"))
        if count % groups.count:
            raise fields.error("n_group", f"does not divide n_routed_experts = {count}")
        if groups.kept > groups.count:
            raise fields.error("topk_group", f"is more than there are groups, {groups.count}")
    inner, shared = fields.integer("moe_intermediate_size"), fields.optional_integer("n_shared_experts", minimum=0)
    return Experts(
        count=count,
        per_token=experts_per_token(fields, count // groups.count * groups.kept if groups else count),
        inner=inner,
        activation=fields.choice("hidden_act", ACTIVATIONS),
        normalize=False,
        scaling=fields.number("routed_scaling_factor"),
        groups=groups,
        shared=SharedExpert(inner=inner * shared, name="shared_experts", gated=False) if shared else None,
    )
