"""ChatGLM 2 and 3, and GLM-4 9B in its first format: GLM with other keys and tensor names."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models import glm
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.names import Names

# What ChatGLMConfig means by a missing key.
DEFAULTS = {
    "num_layers": 28,
    "padded_vocab_size": 65024,
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "kv_channels": 128,
    "num_attention_heads": 32,
    "seq_length": 2048,
    "layernorm_epsilon": 1e-5,
    "rope_ratio": 1.0,
    "add_qkv_bias": False,
    "multi_query_attention": False,
    "multi_query_group_num": 1,
    "eos_token_id": None,
}
NAMES = Names(
    prefix="transformer.",
    modules={
        "embedding.word_embeddings": "model.embed_tokens",
        "encoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
        "encoder.layers.*.input_layernorm": "model.layers.*.input_layernorm",
        "encoder.layers.*.post_attention_layernorm": "model.layers.*.post_attention_layernorm",
        "encoder.layers.*.self_attention.query_key_value": "model.layers.*.self_attn.qkv_proj",
        "encoder.layers.*.self_attention.dense": "model.layers.*.self_attn.o_proj",
        "encoder.layers.*.mlp.dense_h_to_4h": "model.layers.*.mlp.gate_up_proj",
        "encoder.layers.*.mlp.dense_4h_to_h": "model.layers.*.mlp.down_proj",
    },
)
BASE = 10000.0  # of rope, times ``rope_ratio``


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    for key, neutral in {
        "rmsnorm": True,
        "post_layer_norm": True,
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
        "original_rope": True,
        "tie_word_embeddings": False,
        "pre_seq_len": 0,
        "fp32_residual_connection": False,
        "interleaved_qkv": False,
        "quantization_bit": 0,
    }.items():
        fields.require(key, neutral)
    heads = fields.integer("num_attention_heads")
    groups = fields.integer("multi_query_group_num") if fields.flag("multi_query_attention") else heads
    as_glm = {
        "vocab_size": fields.integer("padded_vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("ffn_hidden_size"),
        "num_hidden_layers": fields.get("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": fields.integer("kv_channels"),
        "max_position_embeddings": fields.integer("seq_length"),
        "rms_norm_eps": fields.number("layernorm_epsilon"),
        "rope_theta": BASE * fields.number("rope_ratio"),
        "attention_bias": fields.flag("add_qkv_bias"),
        "bos_token_id": fields.get("bos_token_id"),
        "eos_token_id": fields.get("eos_token_id"),
        "torch_dtype": fields.get("torch_dtype"),
    }
    return glm.from_hf(replace(fields, values=as_glm, defaults=glm.DEFAULTS))


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
        named="GlmForCausalLM",
        model_types=("chatglm",),
        names=NAMES,
    ),
)
