"""Llama 4 (text): layers with and without positions, QK norm without weights, and experts whose inputs are multiplied
by their scores.

A token in a layer with positions sees only its own chunk of ``attention_chunk_size`` tokens. Layers without positions
scale their queries from position ``floor_scale`` on. If no sequence may be that long, the layers are built without it.
"""

from __future__ import annotations

from dataclasses import replace

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    decoder_config,
    experts_per_token,
    full_attention,
    gated_mlp,
    layer_types,
    rms,
)
from llmjax.models.layers.chunks import Sharpening
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.moe import Experts, SharedExpert
from llmjax.models.layers.norm import RMS
from llmjax.models.names import Names

# What Hugging Face's Llama4TextConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
KINDS = ("full_attention", "chunked_attention")
FEED_FORWARD = "model.layers.*.feed_forward"
NAMES = Names(
    modules={
        f"{FEED_FORWARD}.{expert}{part}": f"model.layers.*.mlp.{expert}{part}"
        for expert in ("", "shared_expert.")
        for part in ("gate_proj", "up_proj", "down_proj")
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    count, norm = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), rms(fields)
    rotated, sparse = _rotated(fields, count), _sparse(fields, count)
    kinds = layer_types(fields, [KINDS[i in rotated] for i in range(count)], kinds=KINDS)
    longest = fields.max_model_len or fields.integer("max_position_embeddings")
    attention = full_attention(fields, interleaved=True, bias="attention_bias")
    plain = replace(attention, rope=None, sharpened=_sharpening(fields, longest))
    if fields.flag("use_qk_norm"):
        attention = replace(attention, qk_norm=RMS(norm.eps, weighted=False), qk_norm_first=False)
    experts, mlp = _experts(fields), replace(gated_mlp(fields), inner=fields.integer("intermediate_size_mlp"))
    chunk = fields.optional_integer("attention_chunk_size")
    chunk = None if chunk is None or longest <= chunk else chunk
    layers = [
        LayerSpec(
            mixer=replace(attention if i in rotated else plain, chunk=chunk if kind == KINDS[True] else None),
            feed_forward=experts if i in sparse else mlp,
            norm=norm,
        )
        for i, kind in enumerate(kinds)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


def _sharpening(fields: Fields, longest: int) -> Sharpening | None:
    floor = fields.integer("floor_scale")
    if not fields.flag("attn_temperature_tuning") or longest < floor:
        return None
    return Sharpening(floor, fields.number("attn_scale"))


def _rotated(fields: Fields, count: int) -> set[int]:
    """Layers with positions; the key that marks them is named after the layers without."""
    if not (marks := fields.get("no_rope_layers")):
        interval = fields.integer("no_rope_layer_interval")
        return {i for i in range(count) if (i + 1) % interval}
    if not isinstance(marks, list | tuple) or len(marks) < count or any(mark not in (0, 1) for mark in marks):
        raise fields.error("no_rope_layers", f"must have a 0 or a 1 for each of {count} layers")
    return {i for i in range(count) if marks[i]}


def _sparse(fields: Fields, count: int) -> set[int]:
    """Layers with experts."""
    if fields.get("moe_layers") is not None:
        return set(fields.indices("moe_layers"))
    step = fields.integer("interleave_moe_layer_step")
    return set(range(step - 1, count, step))


def _experts(fields: Fields) -> Experts:
    count, inner = fields.integer("num_local_experts"), fields.integer("intermediate_size")
    return Experts(
        count=count,
        per_token=experts_per_token(fields, count),
        inner=inner,
        activation=fields.choice("hidden_act", ACTIVATIONS),
        normalize=False,
        score="sigmoid",
        scaled_inputs=True,
        shared=SharedExpert(inner=inner, gated=False),
    )


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Llama4ForCausalLM",), model_types=("llama4_text",), names=NAMES),)
