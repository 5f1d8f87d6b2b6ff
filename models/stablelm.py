"""StableLM 3B, 2-1.6B and 2-12B: Llama with LayerNorm and a quarter of each head rotated; 12B has parallel sublayers
after one norm, and QK norm with weights for each head."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    gated_mlp,
    layer_norm,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import Parallel, PreNorm
from llmjax.models.names import Names

# What Hugging Face's StableLmConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# The names in the first checkpoints, StableLMEpochForCausalLM.
ALIASES = {"layer_norm_eps": ("norm_eps",), "partial_rotary_factor": ("rope_pct",)}
NAMES = Names(
    modules={
        "model.layers.*.self_attn.q_layernorm.norms.*": "model.layers.*.self_attn.q_norm",
        "model.layers.*.self_attn.k_layernorm.norms.*": "model.layers.*.self_attn.k_norm",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    attention = full_attention(
        fields,
        partial_rotary=True,
        qkv_bias=fields.flag("use_qkv_bias"),
        qk_norm=layer_norm(fields, bias=False) if fields.flag("qk_layernorm") else None,
        qk_norm_over="each head",
    )
    residual = Parallel() if fields.flag("use_parallel_residual") else PreNorm()
    layer = LayerSpec(mixer=attention, feed_forward=gated_mlp(fields), norm=layer_norm(fields), residual=residual)
    return uniform_decoder(fields, layer)


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
        model_types=("stablelm", "stablelm_epoch"),
        aliases=ALIASES,
        names=NAMES,
    ),
)
