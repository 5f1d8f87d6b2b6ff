"""OLMo 2 and 3: norms behind each half instead of before it, and norms of q and k over all heads; OLMo 3 has a window
on three layers of four, and stretches the others alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
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


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    kinds = layer_types(fields, kinds=("full_attention",))
    ropes = {kind: rope_parameters(fields, kind) for kind in kinds}
    return _olmo(fields, kinds, ropes, "Olmo2ForCausalLM", max_model_len)


def olmo3_from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """`from_hf` for OLMo 3."""
    fields = Fields(config, DEFAULTS_3)
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = layer_types(fields, ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(count)])
    ropes = {kind: rope_parameters(fields, kind, scaled=kind == "full_attention") for kind in set(kinds)}
    return _olmo(fields, kinds, ropes, "Olmo3ForCausalLM", max_model_len)


def _olmo(
    fields: Fields,
    kinds: tuple[str, ...],
    ropes: Mapping[str, Fields],
    architecture: str,
    max_model_len: int | None,
) -> ModelConfig:
    norm, mlp, bias = rms(fields), gated_mlp(fields), fields.flag("attention_bias")
    fields.require("mlp_bias", False)
    attention = attention_by_kind(
        fields,
        kinds,
        window=fields.optional_integer("sliding_window"),
        max_model_len=max_model_len,
        ropes=ropes,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norm,
        qk_norm_over="all heads",
    )
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm, residual=NormedParts()) for kind in kinds]
    return decoder_config(fields, architecture=architecture, layers=layers, norm=norm)
