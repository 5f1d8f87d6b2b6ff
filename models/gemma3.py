"""Gemma 3 (text): four norms per layer, QK norm, scaled embeddings, and five windowed layers for each full one; the two
kinds have ropes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import Sandwich
from llmjax.models.layers.rope_scaling import rope_parameters

# What Hugging Face's Gemma3TextConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "use_bidirectional_attention": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    # Hugging Face has this key in Gemma 3's config and never applies it.
    fields.require("attn_logit_softcapping")
    causal, window = not fields.flag("use_bidirectional_attention"), fields.optional_integer("sliding_window")
    if not causal and window is not None:
        window = window // 2 + 1  # half the window on either side
    fields.require("mlp_bias", False)
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    pattern = fields.integer("sliding_window_pattern")
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    kinds, norm = layer_types(fields, default), rms(fields, plus_one=True)
    attention = attention_by_kind(
        fields,
        kinds,
        window=window,
        causal=causal,
        ropes=local_ropes(fields, kinds),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        qk_norm=norm,
        bias="attention_bias",
    )
    mlp = gated_mlp(fields, activation="hidden_activation")
    return decoder_config(
        fields,
        layers=[LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm, residual=Sandwich()) for kind in kinds],
        norm=norm,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        final_softcap=fields.optional_number("final_logit_softcapping"),
    )


def local_ropes(fields: Fields, kinds: Sequence[str]) -> dict[str, Fields]:
    """Rope keys by kind of layer: windows have a base of their own, and ``rope_scaling`` stretches the others alone."""
    local: dict[str, Any] = {"theta": "rope_local_base_freq", "scaled": False}
    return {
        kind: rope_parameters(fields, kind, **(local if kind == "sliding_attention" else {})) for kind in set(kinds)
    }


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Gemma3ForCausalLM",), model_types=("gemma3_text",)),)
