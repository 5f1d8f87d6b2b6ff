"""InternLM 2 and 2.5: Llama with other tensor names and one matrix for q, k and v, group by group; InternLM 3: Llama
with other keys for biases."""

from __future__ import annotations

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    gated_mlp,
    rms,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import QKV, Names

# What InternLM2Config, which came with the checkpoints, means by a missing key.
DEFAULTS = {**llama.DEFAULTS, "vocab_size": 103168, "bias": True}
# The same of InternLM3Config.
DEFAULTS_3 = {
    **llama.DEFAULTS,
    "vocab_size": 128512,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "qkv_bias": False,
    "bias": False,
}
NAMES = Names(
    modules={
        "model.tok_embeddings": "model.embed_tokens",
        "output": "lm_head",
        "model.layers.*.attention_norm": "model.layers.*.input_layernorm",
        "model.layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
        "model.layers.*.attention.wqkv": "model.layers.*.self_attn.qkv_proj",
        "model.layers.*.attention.wo": "model.layers.*.self_attn.o_proj",
        "model.layers.*.feed_forward.w1": "model.layers.*.mlp.gate_proj",
        "model.layers.*.feed_forward.w3": "model.layers.*.mlp.up_proj",
        "model.layers.*.feed_forward.w2": "model.layers.*.mlp.down_proj",
    },
    qkv=QKV.BY_GROUP,
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    attention = full_attention(fields, bias="bias")
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=gated_mlp(fields), norm=rms(fields)))


def internlm3_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for InternLM 3."""
    bias = fields.flag("bias")
    attention = full_attention(fields, qkv_bias=fields.flag("qkv_bias"), o_bias=bias)
    feed_forward = gated_mlp(fields, bias=bias)
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=feed_forward, norm=rms(fields)))


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("InternLM2ForCausalLM",),
        model_types=("internlm2",),
        names=NAMES,
        rewards_by_one_matrix=True,
    ),
    Family(
        internlm3_from_hf,
        DEFAULTS_3,
        architectures=("InternLM3ForCausalLM",),
        model_types=("internlm3",),
        aliases={"qkv_bias": ("attention_bias",), "bias": ("mlp_bias",)},
    ),
)
