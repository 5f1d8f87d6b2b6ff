"""Text models inside of multimodal ones, whose keys are an object of config.json and whose tensors have a prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmjax.models.registry import MODEL_TYPES

MULTIMODAL = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Classes whose text model is read on its own."""
TEXT = "text_config"
# What multimodal models say for their text model too, if it does not.
SHARED = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
# As checkpoints before Transformers 5 have them, and since.
PREFIX = re.compile(r"^(?:language_model\.(?=model\.|lm_head\.)|(model\.)language_model\.)")


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json that the text model would have by itself; None: it is not inside of another one."""
    architectures, text = config.get("architectures"), config.get(TEXT)
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if named not in MULTIMODAL or not isinstance(text, Mapping):
        return None
    model_type = text.get("model_type")
    architecture = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        return None
    outer = {key: value for key, value in config.items() if key in SHARED or key == "quantization_config"}
    return {**outer, **text, "architectures": [architecture]}


def text_name(name: str) -> str:
    """A tensor's name in a text model by itself; tensors of other parts keep theirs."""
    return PREFIX.sub(lambda found: found[1] or "", name)
