"""GLM-4.5, 4.6 and 4.7: half of each head rotated, and DeepSeek V3's experts after the first layers."""

from __future__ import annotations

from llmjax.models import deepseek_v2, deepseek_v3
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import decoder_config, full_attention, layer_types, rms
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's Glm4MoeConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    layer_types(fields, kinds=("full_attention",))
    norm = rms(fields)
    attention = full_attention(
        fields,
        partial_rotary=True,
        qkv_bias=fields.flag("attention_bias"),
        qk_norm=norm if fields.flag("use_qk_norm") else None,
    )
    feed_forwards = deepseek_v2.feed_forwards(fields, deepseek_v3.sigmoid_experts)
    layers = [LayerSpec(mixer=attention, feed_forward=each, norm=norm) for each in feed_forwards]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Glm4MoeForCausalLM",), model_types=("glm4_moe",)),)
