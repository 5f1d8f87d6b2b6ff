"""DBRX: LayerNorm without a bias, clipped queries, keys and values, and experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import full_attention, uniform_decoder
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.moe import Experts
from llmjax.models.layers.norm import Layer
from llmjax.models.names import Names

# What Hugging Face's DbrxConfig and the configs in it mean by a missing key.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "num_experts": None,
}
ALIASES = {
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "max_position_embeddings": ("max_seq_len",),
}
ATTENTION = {"kv_n_heads": 1, "clip_qkv": None}
EXPERTS = {
    "ffn_hidden_size": 3584,
    "moe_num_experts": 4,
    "moe_top_k": 1,
    "moe_normalize_expert_weights": 1.0,
}
EPS = 1e-5  # no key of config.json says it
BLOCK = "transformer.blocks.*"
NAMES = Names(
    modules={
        "transformer.wte": "model.embed_tokens",
        "transformer.norm_f": "model.norm",
        f"{BLOCK}.norm_attn_norm.norm_1": "model.layers.*.input_layernorm",
        f"{BLOCK}.norm_attn_norm.norm_2": "model.layers.*.post_attention_layernorm",
        f"{BLOCK}.norm_attn_norm.attn.Wqkv": "model.layers.*.self_attn.qkv_proj",
        f"{BLOCK}.norm_attn_norm.attn.out_proj": "model.layers.*.self_attn.o_proj",
        f"{BLOCK}.ffn.router.layer": "model.layers.*.mlp.gate",
        **{
            f"{BLOCK}.ffn.experts.{part}": f"model.layers.*.mlp.experts.{part}"
            for part in ("gate_proj", "up_proj", "down_proj")
        },
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    inner = Fields(fields.mapping("attn_config"), ATTENTION, name="config.json: attn_config")
    inner.require("rope_scaling")
    own = {"num_key_value_heads": inner.integer("kv_n_heads")}
    if inner.get("rope_theta") is not None:
        own["rope_theta"] = inner.get("rope_theta")
    fields = replace(fields, values={**own, **fields.values})
    layer = LayerSpec(
        mixer=full_attention(fields, clip=inner.optional_number("clip_qkv")),
        feed_forward=_experts(Fields(fields.mapping("ffn_config"), EXPERTS, name="config.json: ffn_config")),
        norm=Layer(EPS, bias=False),
    )
    return uniform_decoder(fields, layer)


def _experts(fields: Fields) -> Experts:
    count, per_token = fields.integer("moe_num_experts"), fields.integer("moe_top_k")
    if per_token > count:
        raise fields.error("moe_top_k", f"is more than there are experts, {count}")
    power = fields.optional_number("moe_normalize_expert_weights")
    if power not in (None, 1.0):
        raise fields.error("moe_normalize_expert_weights", "is not supported; 1 and null are")
    function = Fields(fields.mapping("ffn_act_fn"), {"name": "silu"}, name=f"{fields.name}: ffn_act_fn")
    return Experts(
        count=count,
        per_token=per_token,
        inner=fields.integer("ffn_hidden_size"),
        activation=function.choice("name", ACTIVATIONS),
        normalize=power is not None,
    )


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("DbrxForCausalLM",), model_types=("dbrx",), aliases=ALIASES, names=NAMES),
)
