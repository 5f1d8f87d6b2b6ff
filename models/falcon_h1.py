"""Falcon-H1: attention and a Mamba 2 mixer in parallel in every layer, with scaling factors almost everywhere
(maximal update parametrization, Yang et al. 2022, arXiv:2203.03466)."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models import llama, mamba2
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, full_attention, gated_mlp, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import TwoMixers
from llmjax.models.names import Names

# What Hugging Face's FalconH1Config means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    **mamba2.MAMBA_DEFAULTS,
    "vocab_size": 128000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "ssm_multipliers": (1.0,) * 5,
    "mlp_multipliers": (1.0,) * 2,
}
KIND = "full_attention"
_LAYER = "model.layers.*"
NAMES = Names(
    modules={
        "model.final_layernorm": "model.norm",
        f"{_LAYER}.pre_ff_layernorm": f"{_LAYER}.post_attention_layernorm",
        **{f"{_LAYER}.feed_forward.{part}_proj": f"{_LAYER}.mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    lists = ("ssm_multipliers", "mlp_multipliers")  # null stands for factors of 1
    values = {key: value for key, value in fields.values.items() if value is not None or key not in lists}
    fields = replace(fields, values=values)
    count, norm = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), rms(fields)
    attention = full_attention(fields, bias="attention_bias")
    # A factor of keys is one of the logits.
    attention = replace(attention, scale=attention.scale * fields.number("key_multiplier"))
    state_space = mamba2.state_space(
        fields,
        norm=norm if fields.flag("mamba_rms_norm") else None,
        inner="mamba_d_ssm",
        norm_first=fields.flag("mamba_norm_before_gate"),
        out_bias=fields.flag("projectors_bias"),
        scale=fields.number("ssm_in_multiplier"),
        part_scales=fields.numbers("ssm_multipliers", count=5),
    )
    of_gate, of_mlp = fields.numbers("mlp_multipliers", count=2)
    layer = LayerSpec(
        mixer=attention,
        beside=state_space,
        feed_forward=replace(gated_mlp(fields, bias=fields.flag("mlp_bias")), gate_scale=of_gate),
        norm=norm,
        residual=TwoMixers(
            given=fields.number("attention_in_multiplier"),
            mixer=fields.number("attention_out_multiplier"),
            beside=fields.number("ssm_out_multiplier"),
            feed_forward=of_mlp,
        ),
    )
    return decoder_config(
        fields,
        layers=[layer] * count,
        norm=norm,
        embedding_scale=fields.number("embedding_multiplier"),
        logit_scale=fields.number("lm_head_multiplier"),
    )


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("FalconH1ForCausalLM",), model_types=("falcon_h1",), names=NAMES),)
