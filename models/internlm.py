"""InternLM 2 and 2.5: Llama with names of its own and one matrix for q, k and v, group by group; InternLM 3: Llama with
keys of its own for biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_types, rms
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


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    bias = fields.flag("bias")
    return _internlm(fields, "InternLM2ForCausalLM", max_model_len, qkv_bias=bias, o_bias=bias, mlp_bias=False)


def internlm3_from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """`from_hf` for InternLM 3."""
    fields = Fields(config, DEFAULTS_3, aliases={"qkv_bias": ("attention_bias",), "bias": ("mlp_bias",)})
    bias = fields.flag("bias")
    return _internlm(
        fields, "InternLM3ForCausalLM", max_model_len, qkv_bias=fields.flag("qkv_bias"), o_bias=bias, mlp_bias=bias
    )


def _internlm(
    fields: Fields, architecture: str, max_model_len: int | None, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool
) -> ModelConfig:
    kinds, norm = layer_types(fields, kinds=("full_attention",)), rms(fields)
    attention = attention_by_kind(
        fields, kinds, window=None, max_model_len=max_model_len, qkv_bias=qkv_bias, o_bias=o_bias
    )
    layer = LayerSpec(mixer=attention[kinds[0]], feed_forward=gated_mlp(fields, bias=mlp_bias), norm=norm)
    return decoder_config(fields, architecture=architecture, layers=[layer] * len(kinds), norm=norm)
