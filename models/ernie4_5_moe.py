"""ERNIE 4.5 with experts: a softmax router with correction biases for the choice of experts, and shared experts."""

from __future__ import annotations

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import ernie4_5
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    decoder_config,
    experts_per_token,
    full_attention,
    gated_mlp,
    layer_types,
    rms,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.moe import Experts, SharedExpert
from llmjax.models.names import Names

# What Hugging Face's Ernie4_5_MoeConfig means by a missing key.
DEFAULTS = {
    **ernie4_5.DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
ALIASES = {"num_experts": ("moe_num_experts",), "num_experts_per_tok": ("moe_k",)}
NAMES = Names(
    modules={"model.layers.*.mlp.moe_statics": "model.layers.*.mlp.gate"}, vectors=("e_score_correction_bias",)
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    count, norm, bias = len(layer_types(fields, kinds=("full_attention",))), rms(fields), fields.flag("use_bias")
    fields.require("moe_gate_act", "softmax")
    fields.require("moe_norm_gate_logits", True)
    fields.require("moe_norm_min", 1e-12)  # of the sum that shares are divided by, far below any
    fields.require("compression_ratio", 1, 1.0)
    attention, mlp = full_attention(fields, interleaved=True, bias="use_bias"), gated_mlp(fields, bias=bias)
    sparse = _sparse_layers(fields, count)
    if any(sparse) and bias:
        raise fields.error("use_bias", "is not supported with experts")
    experts = _experts(fields) if any(sparse) else mlp
    layers = [LayerSpec(mixer=attention, feed_forward=experts if has else mlp, norm=norm) for has in sparse]
    return decoder_config(fields, layers=layers, norm=norm)


def _sparse_layers(fields: Fields, count: int) -> list[bool]:
    interval = fields.integer("moe_layer_interval")
    start = fields.integer("moe_layer_start_index", minimum=0, maximum=MAX_LAYERS)
    end = fields.integer("moe_layer_end_index", minimum=-1, maximum=MAX_LAYERS)
    last = count - 1 if end == -1 else end
    return [(i + 1) % interval == 0 and start <= i <= last for i in range(count)]


def _experts(fields: Fields) -> Experts:
    count, inner = fields.integer("num_experts"), fields.integer("moe_intermediate_size")
    shared = fields.integer("moe_num_shared_experts", minimum=0)
    return Experts(
        count=count,
        per_token=experts_per_token(fields, count),
        inner=inner,
        activation=fields.choice("hidden_act", ACTIVATIONS),
        normalize=True,
        corrected=True,
        shared=SharedExpert(inner=inner * shared, name="shared_experts", gated=False) if shared else None,
    )


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("Ernie4_5_MoeForCausalLM",),
        model_types=("ernie4_5_moe",),
        aliases=ALIASES,
        names=NAMES,
    ),
)
