"""BLIP's text decoder: BERT whose layers also look up a picture's rows, which every sequence begins with.

A layer in files is two here, of which the first has self-attention and the second cross-attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, full_attention, layer_norm, mlp
from llmjax.models.layers.embedding import LearnedPositions
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.picture import Picture
from llmjax.models.layers.residual import PostNorm, PostNormAlone
from llmjax.models.names import Names

# What Hugging Face's BlipTextConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 30524,
    "hidden_size": 768,
    "encoder_hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "bos_token_id": 30522,
    "sep_token_id": 102,
    "is_decoder": True,
    "tie_word_embeddings": True,
}
# The same of BlipVisionConfig, as far as rows depend on it.
PICTURE = {"image_size": 384, "patch_size": 16}
_WHOLE = {
    "bert.embeddings.word_embeddings": "model.embed_tokens",
    "bert.embeddings.position_embeddings": "model.embed_positions",
    "bert.embeddings.LayerNorm": "model.embed_norm",
    "cls.predictions.transform.dense": "model.head_dense",
    "cls.predictions.transform.LayerNorm": "model.norm",
    "cls.predictions.decoder": "lm_head",
    "cls.predictions": "head_bias",
}
_ATTENTION = {
    "self.query": "self_attn.q_proj",
    "self.key": "self_attn.k_proj",
    "self.value": "self_attn.v_proj",
    "output.dense": "self_attn.o_proj",
    "output.LayerNorm": "input_layernorm",
}
_MLP = {
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_attention_layernorm",
}


def rows(vision: Fields) -> int:
    """The rows of a picture: its patches, and the class token's."""
    return (vision.integer("image_size") // vision.integer("patch_size")) ** 2 + 1


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("is_decoder", True)
    vision = Fields(fields.mapping("vision_config"), PICTURE, name="config.json: vision_config")
    before, norm = rows(vision), layer_norm(fields)
    attention = full_attention(fields, rotary=False, qkv_bias=True, o_bias=True)
    parts = [
        LayerSpec(
            mixer=replace(attention, picture=Picture(before)),
            feed_forward=None,
            norm=norm,
            residual=PostNormAlone(),
        ),
        LayerSpec(
            mixer=replace(attention, picture=Picture(before, fields.integer("encoder_hidden_size"))),
            feed_forward=mlp(fields),
            norm=norm,
            residual=PostNorm(),
        ),
    ]
    positions = LearnedPositions(count=fields.integer("max_position_embeddings"), first=before)
    model = decoder_config(
        fields,
        layers=parts * fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        norm=norm,
        positions=positions,
        embedding_norm=norm,
        looks_up=True,
        head_bias=True,
        head_activation=fields.choice("hidden_act", ("gelu",)),
    )
    end = fields.integer("sep_token_id", minimum=0)
    return replace(model, max_position=before + positions.count, eos_token_ids=(end,))


def names(config: Mapping[str, Any]) -> Names:
    """See ``Family.names``."""
    modules = dict(_WHOLE)
    for number in range(Fields(config, DEFAULTS).integer("num_hidden_layers", maximum=MAX_LAYERS)):
        layer, own = f"bert.encoder.layer.{number}", f"model.layers.{2 * number}"
        cross = f"model.layers.{2 * number + 1}"
        modules |= {f"{layer}.attention.{name}": f"{own}.{known}" for name, known in _ATTENTION.items()}
        modules |= {f"{layer}.crossattention.{name}": f"{cross}.{known}" for name, known in _ATTENTION.items()}
        modules |= {f"{layer}.{name}": f"{cross}.{known}" for name, known in _MLP.items()}
    return Names(prefix="text_decoder.", modules=modules)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("BlipTextLMHeadModel",), model_types=("blip_text_model",), names=names),
)
