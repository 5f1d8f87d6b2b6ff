"""SigLIP's text half: a text is filled up to one length, its tokens all see each other, and the last is projected."""

from __future__ import annotations

from llmjax.models.clip import MODULES, text_model
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.layers.pooling import Dense, Pooler
from llmjax.models.names import Names

# What Hugging Face's SiglipTextConfig means by a missing key; its token ids are not those of published tokenizers.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
NAMES = Names(prefix="text_model.", modules={**MODULES, "head": "head.0.dense"})


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    size = fields.optional_integer("projection_size") or fields.integer("hidden_size")
    length = fields.integer("max_position_embeddings")
    # SigLIP 1 and 2 have learned texts in lower case; not all of their published tokenizers make them so.
    pooler = Pooler(kind="last", dense=(Dense(size=size),), filled_to=length, lowercase=True, of_pictures=True)
    return text_model(fields, pooler=pooler, causal=False)


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("SiglipTextModel",),
        model_types=("siglip_text_model",),
        names=NAMES,
    ),
)
