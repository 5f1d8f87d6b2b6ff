"""Hunyuan 1 (dense): Llama with norms of heads behind their rotation, and a base of rope that a factor stretches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's HunYuanDenseV1Config means by a missing key.
DEFAULTS = {**llama.DEFAULTS, "vocab_size": 290943, "rms_norm_eps": 1e-5, "use_qk_norm": True}
NAMES = Names(
    modules={
        "model.layers.*.self_attn.query_layernorm": "model.layers.*.self_attn.q_norm",
        "model.layers.*.self_attn.key_layernorm": "model.layers.*.self_attn.k_norm",
    }
)


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(_with_alpha(config), DEFAULTS)
    fields.require("use_qk_norm", True)
    fields.require("use_cla", False)
    fields.require("mlp_bias", False)
    kinds, norm, bias = layer_types(fields, kinds=("full_attention",)), rms(fields), fields.flag("attention_bias")
    attention = attention_by_kind(
        fields,
        kinds,
        window=None,
        max_model_len=max_model_len,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norm,
        qk_norm_first=False,
    )
    layer = LayerSpec(mixer=attention[kinds[0]], feed_forward=gated_mlp(fields), norm=norm)
    return decoder_config(fields, architecture="HunYuanDenseV1ForCausalLM", layers=[layer] * len(kinds), norm=norm)


def _with_alpha(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scaling under a name of its own: files call it dynamic, as they do another one without an alpha."""
    changed = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key)
        if not isinstance(scaling, Mapping) or not scaling.get("alpha"):
            continue
        if scaling.get("rope_type", scaling.get("type")) == "dynamic":
            changed[key] = {**scaling, "type": "ntk_alpha", "rope_type": "ntk_alpha"}
    return changed
