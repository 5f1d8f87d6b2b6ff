"""Bamba: Mamba 2 layers, and a few attention layers that rotate half of each head."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models import llama, mamba2
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, full_attention, gated_mlp, rms
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


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    # transformers ignores what the file says here.
    fields = replace(fields, values={**fields.values, "partial_rotary_factor": 0.5})
    count, norm = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), rms(fields)
    full = fields.indices("attn_layer_indices")
    attention = full_attention(fields, partial_rotary=True, bias="attention_bias")
    mamba, mlp = mamba2.state_space(fields, norm=norm), gated_mlp(fields, bias=fields.flag("mlp_bias"))
    layers = [LayerSpec(mixer=attention if i in full else mamba, feed_forward=mlp, norm=norm) for i in range(count)]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("BambaForCausalLM",), model_types=("bamba",), names=NAMES),)
