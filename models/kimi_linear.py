"""Kimi Linear: Kimi Delta Attention, with latent attention without positions on every fourth layer, and DeepSeek V3's
experts."""

from __future__ import annotations

from dataclasses import replace

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import deepseek_v2, deepseek_v3
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import decoder_config, layer_types, rms
from llmjax.models.layers.channel_delta import ChannelDelta
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

DELTA, FULL = "linear_attention", "full_attention"
# What Hugging Face's KimiLinearConfig means by a missing key.
DEFAULTS = {
    **deepseek_v3.DEFAULTS,
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 256,
    "num_experts": None,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "head_dim": 128,
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
# The names in the published models.
ALIASES = {
    "max_position_embeddings": ("model_max_length",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
    "scoring_func": ("moe_router_activation_func",),
    "head_dim": ("linear_head_dim",),
    "num_heads": ("linear_num_heads",),
    "short_conv_kernel_size": ("linear_conv_kernel_dim",),
}
NAMES = Names(
    modules={
        f"model.layers.*.block_sparse_moe.{part}": f"model.layers.*.mlp.{part}"
        for name in ("gate", "up", "down")
        for part in (f"{name}_proj", f"shared_experts.{name}_proj")
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    no_head_dim = {key: value for key, value in fields.values.items() if key != "head_dim"}  # the rotated part alone
    fields = replace(fields, values=no_head_dim)
    fields.require("mla_use_nope", True)
    norm, kinds = rms(fields), _kinds(fields)
    latent = replace(deepseek_v2.latent_attention(fields), rope=None)
    linear = fields.mapping("linear_attn_config")
    delta = _delta(fields if not linear else Fields(linear, DEFAULTS, name="config.json: linear_attn_config"), fields)
    feed_forwards = deepseek_v2.feed_forwards(fields, deepseek_v3.sigmoid_experts)
    deepseek_v3.check_dense_first(fields, len(kinds))
    layers = [
        LayerSpec(mixer=delta if kind == DELTA else latent, feed_forward=each, norm=norm)
        for kind, each in zip(kinds, feed_forwards, strict=True)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


def _kinds(fields: Fields) -> tuple[str, ...]:
    count = fields.integer("num_hidden_layers")
    linear = Fields(fields.mapping("linear_attn_config"), name="config.json: linear_attn_config")
    if linear.get("full_attn_layers") is None:
        return layer_types(fields, [FULL if i and i % 4 == 0 else DELTA for i in range(count)], kinds=(DELTA, FULL))
    full, delta = (linear.indices(key) for key in ("full_attn_layers", "kda_layers"))  # layers count from 1 here
    if sorted((*full, *delta)) != list(range(1, count + 1)):
        raise linear.error("full_attn_layers", f"and kda_layers are not the numbers 1 to {count}, each once")
    return tuple(FULL if i + 1 in full else DELTA for i in range(count))


def _delta(own: Fields, fields: Fields) -> ChannelDelta:
    return ChannelDelta(
        heads=own.integer("num_heads"),
        head_dim=own.integer("head_dim"),
        width=own.integer("short_conv_kernel_size", minimum=2),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        norm=rms(fields),
    )


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("KimiLinearForCausalLM",),
        model_types=("kimi_linear",),
        aliases=ALIASES,
        names=NAMES,
    ),
)
