"""CLIP's text half (CLIP, MetaCLIP 2): each token sees those before it, and the last one's state is projected."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import full_attention, layer_norm, mlp, uniform_decoder
from llmjax.models.layers.embedding import LearnedPositions
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.pooling import Dense, Pooler
from llmjax.models.names import Names

# What Hugging Face's CLIPTextConfig means by a missing key; its token ids are not those of published tokenizers.
DEFAULTS = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "projection_dim": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_LAYER = "encoder.layers.*"
MODULES = {
    "embeddings.token_embedding": "model.embed_tokens",
    "embeddings.position_embedding": "model.embed_positions",
    **{f"{_LAYER}.self_attn.{name}_proj": f"model.layers.*.self_attn.{name}_proj" for name in "qkv"},
    f"{_LAYER}.self_attn.out_proj": "model.layers.*.self_attn.o_proj",
    f"{_LAYER}.layer_norm1": "model.layers.*.input_layernorm",
    f"{_LAYER}.layer_norm2": "model.layers.*.post_attention_layernorm",
    f"{_LAYER}.mlp.fc1": "model.layers.*.mlp.up_proj",
    f"{_LAYER}.mlp.fc2": "model.layers.*.mlp.down_proj",
    "final_layer_norm": "model.norm",
}
NAMES = Names(prefix="text_model.", modules={**MODULES, "text_projection": "head.0.dense"})


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    head = Dense(size=fields.integer("projection_dim"), bias=False)
    return text_model(fields, pooler=Pooler(kind="last", dense=(head,), of_pictures=True), causal=True)


def text_model(fields: Fields, *, pooler: Pooler, causal: bool) -> ModelConfig:
    """The layers that texts go through in CLIP and SigLIP.

    Args:
        causal: whether a token sees those before it alone.
    """
    layer = LayerSpec(
        mixer=full_attention(fields, rotary=False, qkv_bias=True, o_bias=True, causal=causal),
        feed_forward=mlp(fields),
        norm=layer_norm(fields),
    )
    positions = LearnedPositions(count=fields.integer("max_position_embeddings"))
    return uniform_decoder(fields, layer, pooler=pooler, positions=positions)


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("CLIPTextModelWithProjection", "MetaClip2TextModelWithProjection"),
        model_types=("clip_text_model", "metaclip_2_text_model"),
        names=NAMES,
    ),
)
