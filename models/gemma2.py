"""Gemma 2: Gemma with four norms a layer, softcaps, and a window on every second layer."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import Sandwich

# What Hugging Face's Gemma2Config means by a missing key.
DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("use_bidirectional_attention", False)
    fields.require("mlp_bias", False)
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = layer_types(fields, ["full_attention" if i % 2 else "sliding_attention" for i in range(count)])
    norm, mlp = rms(fields, plus_one=True), gated_mlp(fields, activation="hidden_activation")
    attention = attention_by_kind(
        fields,
        kinds,
        window=fields.optional_integer("sliding_window"),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        softcap=fields.optional_number("attn_logit_softcapping"),
        bias="attention_bias",
    )
    return decoder_config(
        fields,
        layers=[LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm, residual=Sandwich()) for kind in kinds],
        norm=norm,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        final_softcap=fields.optional_number("final_logit_softcapping"),
    )


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Gemma2ForCausalLM",), model_types=("gemma2",)),)
