"""DeepSeek-MoE 16B: Llama with experts behind the first layers, and some that every token goes through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import deepseek_v2, llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.moe import Experts

# What DeepseekConfig, which came with the checkpoints, means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 102400,
    "num_hidden_layers": 30,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "moe_intermediate_size": 1407,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    for key, neutral in {"mlp_bias": False, "scoring_func": "softmax", "routed_scaling_factor": 1.0}.items():
        fields.require(key, neutral)
    kinds, norm, bias = layer_types(fields, kinds=("full_attention",)), rms(fields), fields.flag("attention_bias")
    attention = attention_by_kind(fields, kinds, window=None, max_model_len=max_model_len, qkv_bias=bias, o_bias=bias)
    halves = deepseek_v2.feed_forwards(fields, _experts)
    layers = [LayerSpec(mixer=attention[kinds[0]], feed_forward=half, norm=norm) for half in halves]
    return decoder_config(fields, architecture="DeepseekForCausalLM", layers=layers, norm=norm)


def _experts(fields: Fields) -> Experts:
    return deepseek_v2.routed_experts(fields, groups=None, normalize=fields.flag("norm_topk_prob"))
