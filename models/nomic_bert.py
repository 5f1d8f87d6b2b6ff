"""nomic-bert: BERT with rotary embeddings, and gated MLPs without biases or experts in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    decoder_config,
    full_attention,
    gated_mlp,
    layer_norm,
    layer_types,
)
from llmjax.models.layers.layer import FeedForward, LayerSpec
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.moe import AS_GATE, Experts
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
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "moe_every_n_layers": 0,
    "num_experts": 8,
    "moe_top_k": 1,
    "rotary_scaling_factor": None,
    "moe_bias": True,  # may be missing: llama.cpp's converter leaves it out
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
# The activations of MLPs with and without a gate, by that code's activation_function.
GATES, PLAIN = {"swiglu": "silu", "geglu": "gelu"}, ("gelu", "relu", "gelu_new", "gelu_pytorch_tanh")
# The only values allowed for its other keys, which change the mathematics.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "causal": (False,),
    "expert_choice_router": (False,),
    "ffn_div": (1,),
    "moe_normalize_expert_weights": (False,),
    "num_shared_experts": (0,),
    "parallel_block": (False,),
    "prenorm": (False,),
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
        # The names in the published models.
        "emb_ln": "model.embed_norm",
        "encoder.layers.*.attn.Wqkv": "model.layers.*.self_attn.qkv_proj",
        "encoder.layers.*.attn.out_proj": "model.layers.*.self_attn.o_proj",
        "encoder.layers.*.norm1": "model.layers.*.input_layernorm",
        "encoder.layers.*.mlp.fc1": "model.layers.*.mlp.up_proj",
        "encoder.layers.*.mlp.fc11": "model.layers.*.mlp.up_proj",
        "encoder.layers.*.mlp.fc12": "model.layers.*.mlp.gate_proj",
        "encoder.layers.*.mlp.fc2": "model.layers.*.mlp.down_proj",
        "encoder.layers.*.norm2": "model.layers.*.post_attention_layernorm",
        "encoder.layers.*.mlp.router.layer": "model.layers.*.mlp.gate",
        "encoder.layers.*.mlp.experts": "model.layers.*.mlp.experts",
        **{
            f"encoder.layers.*.mlp.experts.{part}_proj": f"model.layers.*.mlp.experts.{part}_proj"
            for part in ("up", "down")
        },
    },
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    for key, neutral in NEUTRAL.items():
        fields.require(key, *neutral)
    count, norm = len(layer_types(fields, kinds=("full_attention",))), layer_norm(fields)
    rope = rope_parameters(fields, "full_attention", theta="rotary_emb_base")
    attention = full_attention(fields, ropes={"full_attention": rope}, bias="qkv_proj_bias", causal=False)
    layers = [
        LayerSpec(mixer=attention, feed_forward=each, norm=norm, residual=PostNorm())
        for each in _feed_forwards(fields, count)
    ]
    model = decoder_config(
        fields,
        layers=layers,
        norm=None,
        pooler=Pooler(kind="mean"),
        token_types=fields.integer("type_vocab_size", minimum=0) or None,
        embedding_norm=norm,
    )
    if fields.get("rotary_scaling_factor") is None:
        return model
    # The rope base grows for texts that are longer than those in training; such texts are not served.
    return replace(model, max_position=min(model.max_position, fields.integer("max_trained_positions")))


def _feed_forwards(fields: Fields, count: int) -> list[FeedForward]:
    every, mlp = fields.integer("moe_every_n_layers", minimum=0), _mlp(fields)
    experts = _experts(fields) if every else mlp
    return [experts if every and i % every == 1 else mlp for i in range(count)]


def _mlp(fields: Fields) -> GatedMLP | MLP:
    if fields.get("activation_function") is None:
        return gated_mlp(fields)
    activation, bias = fields.choice("activation_function", (*GATES, *PLAIN)), fields.flag("mlp_fc1_bias")
    if fields.flag("mlp_fc2_bias") != bias:
        raise fields.error("mlp_fc2_bias", "is not mlp_fc1_bias")
    inner = fields.integer("intermediate_size")
    if activation in PLAIN:
        return MLP(inner=inner, activation=activation, bias=bias)
    return GatedMLP(inner=inner, activation=GATES[activation], bias=bias)


def _experts(fields: Fields) -> Experts:
    """Experts without gates and biases; one bias is added to the sum of their outputs."""
    count, per_token = fields.integer("num_experts"), fields.integer("moe_top_k")
    if per_token > count:
        raise fields.error("moe_top_k", f"is more than there are experts, {count}")
    activation = fields.choice("activation_function", AS_GATE)
    return Experts(
        count=count,
        per_token=per_token,
        inner=fields.integer("intermediate_size"),
        activation=activation,
        normalize=False,
        gated=False,
        out_bias=fields.flag("moe_bias"),
    )


FAMILIES = (
    Family(
        from_hf, DEFAULTS, architectures=("NomicBertModel",), model_types=("nomic_bert",), aliases=ALIASES, names=NAMES
    ),
)
