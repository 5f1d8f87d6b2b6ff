"""nomic-bert: BERT with rotated heads and gated feed-forward halves, and no biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_norm, layer_types
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.layers.pooling import Pooler
from llmjax.models.layers.residual import PostNorm
from llmjax.models.layers.rope_scaling import rope_parameters
from llmjax.models.names import Names

# What Hugging Face's NomicBertConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 30528,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "rotary_emb_base": 1000.0,
    "tie_word_embeddings": True,
}
# The code that came with the published models has GPT-2's keys.
ALIASES = {
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
    "layer_norm_eps": ("layer_norm_epsilon",),
}
GATES = {"swiglu": "silu", "geglu": "gelu"}  # by that code's activation_function
# What its other keys may say: they change the mathematics.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "causal": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "moe_every_n_layers": (0,),
    "parallel_block": (False,),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "scale_attn_by_inverse_layer_idx": (False,),
    "use_rms_norm": (False,),
}
NAMES = Names(
    prefix="model.",
    modules={
        "embeddings.word_embeddings": "model.embed_tokens",
        "embeddings.token_type_embeddings": "model.embed_types",
        "embeddings.LayerNorm": "model.embed_norm",
        "layers.*.post_attention_layernorm": "model.layers.*.input_layernorm",
        "layers.*.post_mlp_layernorm": "model.layers.*.post_attention_layernorm",
        # As the published models have them.
        "emb_ln": "model.embed_norm",
        "encoder.layers.*.attn.Wqkv": "model.layers.*.self_attn.qkv_proj",
        "encoder.layers.*.attn.out_proj": "model.layers.*.self_attn.o_proj",
        "encoder.layers.*.norm1": "model.layers.*.input_layernorm",
        "encoder.layers.*.mlp.fc11": "model.layers.*.mlp.up_proj",
        "encoder.layers.*.mlp.fc12": "model.layers.*.mlp.gate_proj",
        "encoder.layers.*.mlp.fc2": "model.layers.*.mlp.down_proj",
        "encoder.layers.*.norm2": "model.layers.*.post_attention_layernorm",
    },
)


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS, aliases=ALIASES)
    for key, neutral in NEUTRAL.items():
        fields.require(key, *neutral)
    kinds, norm = layer_types(fields, kinds=("full_attention",)), layer_norm(fields)
    attention = attention_by_kind(
        fields,
        kinds,
        window=None,
        max_model_len=max_model_len,
        ropes={kind: rope_parameters(fields, kind, theta="rotary_emb_base") for kind in kinds},
        causal=False,
    )
    layers = [
        LayerSpec(mixer=attention[kind], feed_forward=_half(fields), norm=norm, residual=PostNorm()) for kind in kinds
    ]
    model = decoder_config(
        fields,
        architecture="NomicBertModel",
        layers=layers,
        norm=None,
        pooler=Pooler(kind="mean"),
        token_types=fields.integer("type_vocab_size", minimum=0) or None,
        embedding_norm=norm,
    )
    if fields.get("rotary_scaling_factor") is None:
        return model
    # The base is stretched for texts that are longer than those it was trained on; they are not served.
    return replace(model, max_position=min(model.max_position, fields.integer("max_trained_positions")))


def _half(fields: Fields) -> GatedMLP:
    if fields.get("activation_function") is None:
        return gated_mlp(fields)
    return GatedMLP(
        inner=fields.integer("intermediate_size"), activation=GATES[fields.choice("activation_function", GATES)]
    )
