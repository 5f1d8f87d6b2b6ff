"""MiniMax M2: QK norm over all heads, a part of each head rotated, and experts chosen by sigmoid scores with
correction biases."""

from __future__ import annotations

from dataclasses import replace

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    experts_per_token,
    full_attention,
    rms,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.moe import Experts

# What Hugging Face's MiniMaxM2Config means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rope_theta": 5e6,
    "use_qk_norm": True,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "bos_token_id": 200034,
    "eos_token_id": 200020,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields = with_rotated_part(fields)
    for key, neutral in {
        "attention_bias": False,
        "mlp_bias": False,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "sliding_window": 0,
        "attn_type_list": [1] * fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        "layernorm_full_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
    }.items():
        fields.require(key, neutral)
    norm, count = rms(fields), fields.integer("num_local_experts")
    experts = Experts(
        count=count,
        per_token=experts_per_token(fields, count),
        inner=fields.integer("intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        normalize=True,
        score="sigmoid",
        corrected=True,
    )
    attention = full_attention(fields, partial_rotary=True, qk_norm=norm, qk_norm_over="all heads")
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=experts, norm=norm))


def with_rotated_part(fields: Fields) -> Fields:
    """The keys with ``rotary_dim``, a number of entries, converted to ``partial_rotary_factor``."""
    if fields.values.get("rotary_dim") is None or fields.values.get("partial_rotary_factor") is not None:
        return fields
    size = fields.optional_integer("head_dim")
    size = size or max(1, fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    return replace(fields, values={**fields.values, "partial_rotary_factor": fields.integer("rotary_dim") / size})


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("MiniMaxM2ForCausalLM",), model_types=("minimax_m2",)),)
