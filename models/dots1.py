"""dots.llm1: QK norm, optional windows on the upper layers, and DeepSeek V3's experts after the first layers."""

from __future__ import annotations

from llmjax.models import deepseek_v2, deepseek_v3, llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, layer_types, rms
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's Dots1Config means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "first_k_dense_replace": 0,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    count, window = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.optional_integer("sliding_window")
    full = count if window is None else min(count, fields.integer("max_window_layers", minimum=0))
    kinds = layer_types(fields, ["full_attention"] * full + ["sliding_attention"] * (count - full))
    norm = rms(fields)
    attention = attention_by_kind(fields, kinds, window=window, bias="attention_bias", qk_norm=norm)
    feed_forwards = deepseek_v2.feed_forwards(fields, deepseek_v3.sigmoid_experts)
    layers = [
        LayerSpec(mixer=attention[kind], feed_forward=each, norm=norm)
        for kind, each in zip(kinds, feed_forwards, strict=True)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Dots1ForCausalLM",), model_types=("dots1",)),)
