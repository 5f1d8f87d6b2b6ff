"""Jamba: Mamba layers, a few attention layers without positions, and experts on every other layer."""

from __future__ import annotations

from llmjax.models import llama, mamba
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    decoder_config,
    full_attention,
    gated_mlp,
    rms,
    softmax_experts,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's JambaConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    **{key: value for key, value in mamba.DEFAULTS.items() if key.startswith("mamba_")},
    "vocab_size": 65536,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
}
KIND = "full_attention"
NAMES = Names(
    modules={
        "model.final_layernorm": "model.norm",
        "model.layers.*.pre_ff_layernorm": "model.layers.*.post_attention_layernorm",
        **{
            f"model.layers.*.feed_forward.{part}_proj": f"model.layers.*.mlp.{part}_proj"
            for part in ("gate", "up", "down")
        },
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("sliding_window")
    count, norm = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), rms(fields)
    attention, mlp = full_attention(fields, rotary=False), gated_mlp(fields)
    state_space = mamba.state_space(fields, norm=norm)
    has_experts = fields.integer("num_experts") > 1
    experts = softmax_experts(fields, inner="intermediate_size", normalize=False) if has_experts else mlp
    attends, chooses = _every(fields, "attn_layer"), _every(fields, "expert_layer")
    layers = [
        LayerSpec(
            mixer=attention if i % attends[0] == attends[1] else state_space,
            feed_forward=experts if i % chooses[0] == chooses[1] else mlp,
            norm=norm,
        )
        for i in range(count)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


def _every(fields: Fields, name: str) -> tuple[int, int]:
    """The period of a kind of layer, and the index of the first one."""
    period, offset = fields.integer(f"{name}_period"), fields.integer(f"{name}_offset", minimum=0)
    if offset >= period:
        raise fields.error(f"{name}_offset", f"is not less than {name}_period = {period}")
    return period, offset


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("JambaForCausalLM",), model_types=("jamba",), names=NAMES),)
