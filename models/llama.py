"""Llama 1 to 3.3, and other models published as LlamaForCausalLM: Yi, SmolLM2, CodeLlama, ..."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's LlamaConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Names in the first checkpoints of Yi.
YI_NAMES = Names(
    modules={
        "model.layers.*.ln1": "model.layers.*.input_layernorm",
        "model.layers.*.ln2": "model.layers.*.post_attention_layernorm",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    kinds = layer_types(fields)
    window = fields.optional_integer("sliding_window")
    if window is not None and "sliding_attention" not in kinds:
        raise fields.error("sliding_window", "is not part of Llama; a windowed model is MistralForCausalLM")
    attention = attention_by_kind(fields, kinds, window=window, bias="attention_bias")
    mlp, norm = gated_mlp(fields, bias=fields.flag("mlp_bias")), rms(fields)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("LlamaForCausalLM",), model_types=("llama",)),
    Family(
        from_hf,
        DEFAULTS,
        architectures=("YiForCausalLM",),
        named="LlamaForCausalLM",
        model_types=("Yi",),
        names=YI_NAMES,
    ),
)
