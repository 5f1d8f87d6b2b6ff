"""DeepSeek-MoE 16B: Llama with experts after the first layers, some of them shared by all tokens."""

from __future__ import annotations

from llmjax.models import deepseek_v2, llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import decoder_config, full_attention, layer_types, rms
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


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    for key, neutral in {"mlp_bias": False, "scoring_func": "softmax", "routed_scaling_factor": 1.0}.items():
        fields.require(key, neutral)
    layer_types(fields, kinds=("full_attention",))
    attention, norm = full_attention(fields, bias="attention_bias"), rms(fields)
    feed_forwards = deepseek_v2.feed_forwards(fields, _experts)
    layers = [LayerSpec(mixer=attention, feed_forward=each, norm=norm) for each in feed_forwards]
    return decoder_config(fields, layers=layers, norm=norm)


def _experts(fields: Fields) -> Experts:
    return deepseek_v2.routed_experts(fields, groups=None, normalize=fields.flag("norm_topk_prob"))


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("DeepseekForCausalLM",), model_types=("deepseek",)),)
