"""Molmo 2's text half: Qwen 3 or OLMo 3 under other names, whose tokens of pictures have a table of their own."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models import qwen2
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import PreNorm, Residual
from llmjax.models.layers.rope_scaling import rope_parameters
from llmjax.models.names import Names

# What Hugging Face's Molmo2TextConfig means by a missing key.
DEFAULTS = {
    **qwen2.DEFAULTS,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 36864,
    "attention_bias": False,
    "qk_norm_type": "qwen3",
    "norm_after": False,
    "rope_scaling_layers": None,
}
ALIASES = {"attention_bias": ("qkv_bias",), "rms_norm_eps": ("layer_norm_eps",)}
_LAYER, _OWN = "blocks.*", "model.layers.*"
NAMES = Names(
    prefix="model.transformer.",
    modules={
        "wte.embedding": "model.embed_tokens",
        f"{_LAYER}.attn_norm": f"{_OWN}.input_layernorm",
        f"{_LAYER}.ff_norm": f"{_OWN}.post_attention_layernorm",
        f"{_LAYER}.self_attn.att_proj": f"{_OWN}.self_attn.qkv_proj",
        f"{_LAYER}.self_attn.attn_out": f"{_OWN}.self_attn.o_proj",
        f"{_LAYER}.self_attn.q_norm": f"{_OWN}.self_attn.q_norm",
        f"{_LAYER}.self_attn.k_norm": f"{_OWN}.self_attn.k_norm",
        f"{_LAYER}.mlp.ff_proj": f"{_OWN}.mlp.up_gate_proj",
        f"{_LAYER}.mlp.ff_out": f"{_OWN}.mlp.down_proj",
        "ln_f": "model.norm",
    },
)
SCALED, UNSCALED = "scaled", "unscaled"
NORM_AFTER = Residual(None, "input_layernorm", None, "post_attention_layernorm")


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    count, norm, mlp = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), rms(fields), gated_mlp(fields)
    chosen = range(count) if fields.get("rope_scaling_layers") is None else fields.indices("rope_scaling_layers")
    kinds = [SCALED if number in chosen else UNSCALED for number in range(count)]
    scaled = rope_parameters(fields, "full_attention")
    plain = replace(scaled, values={"rope_type": "default", "rope_theta": scaled.get("rope_theta")})
    over = "head" if fields.choice("qk_norm_type", ("qwen3", "olmo")) == "qwen3" else "all heads"
    attention = attention_by_kind(
        fields,
        kinds,
        window=None,
        ropes={SCALED: scaled, UNSCALED: plain},
        qkv_bias=fields.flag("attention_bias"),
        qk_norm=norm,
        qk_norm_over=over,
    )
    residual = NORM_AFTER if fields.flag("norm_after") else PreNorm()
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm, residual=residual) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("Molmo2ForCausalLM",),
        model_types=("molmo2_text",),
        aliases=ALIASES,
        names=NAMES,
    ),
)
