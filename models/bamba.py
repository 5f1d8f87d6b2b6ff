"""Bamba: state spaces of Mamba 2, with attention over half-rotated heads on a few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama, mamba2
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's BambaConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    **mamba2.MAMBA_DEFAULTS,
    "vocab_size": 128000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "attn_layer_indices": None,
}
NAMES = Names(
    modules={
        "model.final_layernorm": "model.norm",
        "model.layers.*.pre_ff_layernorm": "model.layers.*.post_attention_layernorm",
        **{
            f"model.layers.*.feed_forward.{part}": f"model.layers.*.mlp.{part}"
            for part in ("gate_proj", "up_proj", "down_proj")
        },
    }
)


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields({**config, "partial_rotary_factor": 0.5}, DEFAULTS)  # whatever the file says, as in transformers
    count, norm, bias = (
        fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        rms(fields),
        fields.flag("attention_bias"),
    )
    full = fields.indices("attn_layer_indices")
    attention = attention_by_kind(
        fields,
        ("full_attention",),
        window=None,
        max_model_len=max_model_len,
        partial_rotary=True,
        qkv_bias=bias,
        o_bias=bias,
    )["full_attention"]
    mamba, mlp = mamba2.state_space(fields, norm=norm), gated_mlp(fields, bias=fields.flag("mlp_bias"))
    layers = [LayerSpec(mixer=attention if i in full else mamba, feed_forward=mlp, norm=norm) for i in range(count)]
    return decoder_config(fields, architecture="BambaForCausalLM", layers=layers, norm=norm)
