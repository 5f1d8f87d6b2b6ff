"""EXAONE 3 and 3.5: Llama with other keys and names; EXAONE 4: norms after each sublayer instead of before it, QK
norm, and in the large model windows; only layers with a window are rotated there."""

from __future__ import annotations

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    attention_by_kind,
    decoder_config,
    full_attention,
    gated_mlp,
    layer_types,
    rms,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import NormedParts
from llmjax.models.names import Names

# What ExaoneConfig, which came with the checkpoints, means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
}
ALIASES = {
    "num_hidden_layers": ("num_layers",),
    "hidden_act": ("activation_function",),
    "rms_norm_eps": ("layer_norm_epsilon",),
}
NAMES = Names(
    prefix="transformer.",
    modules={
        "wte": "model.embed_tokens",
        "ln_f": "model.norm",
        "h.*.ln_1": "model.layers.*.input_layernorm",
        "h.*.ln_2": "model.layers.*.post_attention_layernorm",
        "h.*.attn.attention.q_proj": "model.layers.*.self_attn.q_proj",
        "h.*.attn.attention.k_proj": "model.layers.*.self_attn.k_proj",
        "h.*.attn.attention.v_proj": "model.layers.*.self_attn.v_proj",
        "h.*.attn.attention.out_proj": "model.layers.*.self_attn.o_proj",
        "h.*.mlp.c_fc_0": "model.layers.*.mlp.gate_proj",
        "h.*.mlp.c_fc_1": "model.layers.*.mlp.up_proj",
        "h.*.mlp.c_proj": "model.layers.*.mlp.down_proj",
    },
)
# What Hugging Face's Exaone4Config means by a missing key.
DEFAULTS_4 = {
    **DEFAULTS,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    for key in ("attention_bias", "mlp_bias"):
        fields.require(key, False)
    layer = LayerSpec(mixer=full_attention(fields), feed_forward=gated_mlp(fields), norm=rms(fields))
    return uniform_decoder(fields, layer)


def exaone4_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for EXAONE 4."""
    for key in ("attention_bias", "mlp_bias"):
        fields.require(key, False)
    window, norm, mlp = fields.optional_integer("sliding_window"), rms(fields), gated_mlp(fields)
    kinds = _kinds(fields, window)
    without_rope = () if window is None else ("full_attention",)
    attention = attention_by_kind(fields, kinds, window=window, without_rope=without_rope, qk_norm=norm)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm, residual=NormedParts()) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


def _kinds(fields: Fields, window: int | None) -> tuple[str, ...]:
    if window is None or fields.get("layer_types") is not None:
        return layer_types(fields)
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):  # local and global layers
        local = [pattern[i % len(pattern)] == "L" for i in range(count)]
    else:
        local = [(i + 1) % fields.integer("sliding_window_pattern") > 0 for i in range(count)]
    return layer_types(fields, ["sliding_attention" if each else "full_attention" for each in local])


FAMILIES = (
    Family(
        from_hf, DEFAULTS, architectures=("ExaoneForCausalLM",), model_types=("exaone",), aliases=ALIASES, names=NAMES
    ),
    Family(exaone4_from_hf, DEFAULTS_4, architectures=("Exaone4ForCausalLM",), model_types=("exaone4",)),
)
