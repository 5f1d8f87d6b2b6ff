"""gpt-oss: attention with sinks, a window on every second layer, and experts with biases and clamped gates in every
layer."""

from __future__ import annotations

from dataclasses import replace

from llmjax.kernels.activations import CLAMPED_AT, CLAMPED_SLOPE, CLAMPED_SWIGLU
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, layer_types, rms, softmax_experts
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's GptOssConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}
# What a missing scaling means.
SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
NAMES = Names(modules={"model.layers.*.mlp.router": "model.layers.*.mlp.gate"})


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    if not (fields.values.get("rope_scaling") or fields.values.get("rope_parameters")):
        fields = replace(fields, values={**fields.values, "rope_scaling": SCALING})
    for key, neutral in {
        "mlp_bias": False,
        "hidden_act": "silu",
        "swiglu_limit": CLAMPED_AT,
        "swiglu_alpha": CLAMPED_SLOPE,
    }.items():
        fields.require(key, neutral)
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = layer_types(fields, ["full_attention" if i % 2 else "sliding_attention" for i in range(count)])
    norm, window = rms(fields), fields.optional_integer("sliding_window")
    attention = attention_by_kind(fields, kinds, window=window, bias="attention_bias", sinks=True)
    # A softmax over the chosen experts equals a normalized softmax over all experts.
    experts = softmax_experts(fields, inner="intermediate_size", normalize=True)
    experts = replace(experts, activation=CLAMPED_SWIGLU, bias=True)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=experts, norm=norm) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("GptOssForCausalLM",), model_types=("gpt_oss",), names=NAMES),)
