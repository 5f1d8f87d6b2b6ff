"""Command R, R+ and Aya (`cohere`), and R7B and A (`cohere2`): parallel sublayers after one LayerNorm
without a bias, heads rotated in neighboring pairs, scaled logits; Cohere 2 has windows, and rope only with a window."""

from __future__ import annotations

from typing import Any

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, layer_norm, layer_types
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import Parallel

# What Hugging Face's CohereConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "logit_scale": 0.0625,
    "attention_bias": False,
    "use_qk_norm": False,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
# The same of Cohere2Config.
DEFAULTS_2 = {
    **{key: value for key, value in DEFAULTS.items() if key != "use_qk_norm"},
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
NEUTRAL_2 = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    kinds = layer_types(fields, kinds=("full_attention",))
    qk_norm = layer_norm(fields, bias=False) if fields.flag("use_qk_norm") else None
    return _cohere(fields, kinds, qk_norm=qk_norm, qk_norm_over="each head")


def cohere2_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for Cohere 2."""
    for key, neutral in NEUTRAL_2.items():
        fields.require(key, neutral)
    count, pattern = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.integer("sliding_window_pattern")
    kinds = layer_types(fields, ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)])
    return _cohere(fields, kinds, without_rope=("full_attention",))


def _cohere(fields: Fields, kinds: tuple[str, ...], **differences: Any) -> ModelConfig:
    fields.require("mlp_bias", False)
    window = fields.optional_integer("sliding_window")
    attention = attention_by_kind(fields, kinds, window=window, interleaved=True, bias="attention_bias", **differences)
    norm, mlp = layer_norm(fields, bias=False), gated_mlp(fields)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm, residual=Parallel()) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm, logit_scale=fields.number("logit_scale"))


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("CohereForCausalLM",),
        model_types=("cohere",),
        aliases={"max_position_embeddings": ("model_max_length",)},
    ),
    Family(
        cohere2_from_hf,
        DEFAULTS_2,
        architectures=("Cohere2ForCausalLM",),
        model_types=("cohere2",),
        aliases={"sliding_window_pattern": ("layer_switch",)},
    ),
)
