"""OPT: learned positions from the third row on, LayerNorm, and a ReLU MLP without a gate."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import full_attention, mlp, uniform_decoder
from llmjax.models.layers.embedding import LearnedPositions
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.norm import Layer
from llmjax.models.layers.residual import PostNorm, PreNorm
from llmjax.models.names import Names

# What Hugging Face's OPTConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "activation_function": "relu",
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
EPS = 1e-5  # Hugging Face's norms do not read the config
OFFSET = 2  # rows of the table of positions that were meant for padding
NAMES = Names(
    prefix="model.",
    modules={
        "decoder.embed_tokens": "model.embed_tokens",
        "decoder.embed_positions": "model.embed_positions",
        "decoder.final_layer_norm": "model.norm",
        "decoder.project_in": "model.project_in",
        "decoder.project_out": "model.project_out",
        "decoder.layers.*.self_attn_layer_norm": "model.layers.*.input_layernorm",
        "decoder.layers.*.final_layer_norm": "model.layers.*.post_attention_layernorm",
        "decoder.layers.*.self_attn.q_proj": "model.layers.*.self_attn.q_proj",
        "decoder.layers.*.self_attn.k_proj": "model.layers.*.self_attn.k_proj",
        "decoder.layers.*.self_attn.v_proj": "model.layers.*.self_attn.v_proj",
        "decoder.layers.*.self_attn.out_proj": "model.layers.*.self_attn.o_proj",
        "decoder.layers.*.fc1": "model.layers.*.mlp.up_proj",
        "decoder.layers.*.fc2": "model.layers.*.mlp.down_proj",
    },
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("layer_norm_elementwise_affine", True)
    fields.require("num_key_value_heads", fields.integer("num_attention_heads"))
    norm, bias = Layer(EPS), fields.flag("enable_bias")
    # 350M has norms after its sublayers, no final norm, and an embedding size that differs from its hidden size.
    before, narrow = fields.flag("do_layer_norm_before"), fields.optional_integer("word_embed_proj_dim")
    layer = LayerSpec(
        mixer=full_attention(fields, rotary=False, bias="enable_bias"),
        feed_forward=mlp(fields, inner=fields.integer("ffn_dim"), activation="activation_function", bias=bias),
        norm=norm,
        residual=PreNorm() if before else PostNorm(),
    )
    return uniform_decoder(
        fields,
        layer,
        norm=norm if before and not fields.flag("_remove_final_layer_norm") else None,
        embedding_size=None if narrow == fields.integer("hidden_size") else narrow,
        positions=LearnedPositions(count=fields.integer("max_position_embeddings"), offset=OFFSET),
    )


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("OPTForCausalLM",), model_types=("opt",), names=NAMES),)
