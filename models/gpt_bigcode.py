"""GPTBigCode (StarCoder, SantaCoder, WizardCoder-15B): GPT-2 whose heads share one key and value head."""

from __future__ import annotations

from llmjax.models import gpt2
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.names import QKV, Names

# What Hugging Face's GPTBigCodeConfig means by a missing key.
DEFAULTS = {**gpt2.DEFAULTS, "activation_function": "gelu_pytorch_tanh", "multi_query": True}
# Rows of one group are the queries, the key and the value, and so are those of each head without multi_query.
NAMES = Names(prefix="transformer.", modules=gpt2.MODULES, qkv=QKV.BY_GROUP)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("scale_attn_by_inverse_layer_idx", False)
    kv_heads = 1 if fields.flag("multi_query") else fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", kv_heads)
    return gpt2.gpt2_config(fields, kv_heads=kv_heads)


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("GPTBigCodeForCausalLM",),
        model_types=("gpt_bigcode",),
        aliases=gpt2.ALIASES,
        names=NAMES,
    ),
)
