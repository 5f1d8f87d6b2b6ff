"""OLMo 2 and 3: norms after each sublayer instead of before it, and QK norm over all heads; OLMo 3 has a window on
three layers of four, and scales rope only in the others."""

from __future__ import annotations

from collections.abc import Mapping

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import NormedParts
from llmjax.models.layers.rope_scaling import rope_parameters

# What Hugging Face's Olmo2Config means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 50279,
}
# The same of Olmo3Config.
DEFAULTS_3 = {**DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    kinds = layer_types(fields, kinds=("full_attention",))
    return _olmo(fields, kinds, {kind: rope_parameters(fields, kind) for kind in kinds})


def olmo3_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for OLMo 3."""
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = layer_types(fields, ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(count)])
    return _olmo(
        fields, kinds, {kind: rope_parameters(fields, kind, scaled=kind == "full_attention") for kind in set(kinds)}
    )


def _olmo(fields: Fields, kinds: tuple[str, ...], ropes: Mapping[str, Fields]) -> ModelConfig:
    norm, mlp, window = rms(fields), gated_mlp(fields), fields.optional_integer("sliding_window")
    fields.require("mlp_bias", False)
    attention = attention_by_kind(
        fields, kinds, window=window, ropes=ropes, bias="attention_bias", qk_norm=norm, qk_norm_over="all heads"
    )
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm, residual=NormedParts()) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("Olmo2ForCausalLM",), model_types=("olmo2",)),
    Family(olmo3_from_hf, DEFAULTS_3, architectures=("Olmo3ForCausalLM",), model_types=("olmo3",)),
)
