"""Readers for the keys of config.json that families have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.moe import Experts, SharedExpert
from llmjax.models.layers.norm import RMS, Layer, NormSpec
from llmjax.models.layers.rope_scaling import (
    LAYER_TYPES,
    RopeLengths,
    of_whole_heads,
    resolve_rope,
    rope_parameters,
)

MAX_LAYERS = 4096  # far above any model: a wrong number must not build a million modules

# Keys for mathematics that this decoder does not have, with the values that change nothing.
_FOREIGN: Mapping[str, tuple[Any, ...]] = {
    "activation_sparsity_pattern": (),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_in_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "attention_out_multiplier": (1, 1.0),
    "attn_logit_softcapping": (),
    "attn_scale": (),
    "attn_temperature_tuning": (False, 0),
    "clip_qkv": (),
    "dim_model_base": (),
    "embedding_multiplier": (1, 1.0),
    "enable_moe_block": (False,),
    "final_logit_softcapping": (),
    "full_attn_mod": (1,),
    "hidden_size_per_layer_input": (0,),
    "interpolate_factor": (1, 1.0),
    "key_multiplier": (1, 1.0),
    "lm_head_multiplier": (1, 1.0),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "n_routed_experts": (0,),
    "no_rope_layers": ([],),
    "num_kv_shared_layers": (0,),
    "parallel_attn": (False,),
    "position_embedding_type": ("absolute", "rope", "rope_gptj"),
    "pruned_heads": ({},),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "rope_ratio": (1, 1.0),
    "rotary_scaling_factor": (1, 1.0),
    "routed_scaling_factor": (1, 1.0),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_depth": (),
    "scale_emb": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "use_cla": (False,),
    "use_dynamic_ntk": (False,),
    "use_logn_attn": (False,),
    "use_mla": (False,),
    "use_mrope": (False,),
    "use_nope": (False,),
    "use_qk_norm": (False,),
    "use_parallel_residual": (False,),
    "use_rotary_pos_emb": (True,),
    "use_sliding_window": (False,),
}
# Two names of one key, which Transformers 5 treats as equal; families with experts read them.
_EXPERT_COUNTS = ("num_experts", "num_local_experts")


def layer_types(
    fields: Fields, default: Sequence[str] | None = None, *, kinds: Sequence[str] = LAYER_TYPES
) -> tuple[str, ...]:
    """The kind of attention of each layer: ``layer_types`` where given, else ``default``, else full everywhere.

    Args:
        kinds: the kinds that the family may have.
    """
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    names = fields.get("layer_types")
    if names is None:
        return tuple(default) if default is not None else ("full_attention",) * count
    if not isinstance(names, list | tuple) or len(names) != count:
        raise fields.error("layer_types", f"must be a list of num_hidden_layers = {count} names")
    for name in names:
        Fields({"layer_types": name}, name=fields.name).choice("layer_types", kinds)
    return tuple(names)


def attention_by_kind(
    fields: Fields,
    kinds: Sequence[str],
    *,
    window: int | None,
    bias: str | None = None,
    ropes: Mapping[str, Fields] | None = None,
    partial_rotary: bool = False,
    interleaved: bool = False,
    rotary: bool = True,
    without_rope: Sequence[str] = (),
    **differences: Any,
) -> dict[str, Attention]:
    """The attention of each kind of layer, from the keys that every family has.

    Args:
        kinds: kinds of the layers, from `layer_types`.
        window: window of the layers called sliding_attention, in tokens.
        bias: the key that says whether q, k, v and o have biases; None: ``differences`` say it, or they have none.
        ropes: rope keys by kind, where a family does not write them as most do.
        partial_rotary: whether the family heeds ``partial_rotary_factor``.
        interleaved: whether neighboring entries are rotated together, not the halves of a head.
        rotary: False: no layer has a rotary embedding.
        without_rope: kinds without a rotary embedding.
        differences: fields of Attention in which the family differs from its defaults.
    """
    if "sliding_attention" in kinds and window is None:
        raise fields.error("sliding_window", "but some layers have a sliding window")
    hidden_size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"does not divide num_attention_heads = {heads}")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % heads:
            raise fields.error("hidden_size", f"is not divisible by num_attention_heads = {heads}; give head_dim")
        head_dim = hidden_size // heads
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5}
    if bias is not None:
        sizes |= dict.fromkeys(("qkv_bias", "o_bias"), fields.flag(bias))
    if not rotary:
        windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        return {kind: Attention(rope=None, window=own, **(sizes | differences)) for kind, own in windows.items()}
    lengths = RopeLengths(fields.integer("max_position_embeddings"), fields.max_model_len)
    _check_chunks(fields, fields.max_model_len or lengths.max_position)
    parameters = {kind: ropes[kind] if ropes else rope_parameters(fields, kind) for kind in dict.fromkeys(kinds)}
    if not partial_rotary:
        parameters = {kind: of_whole_heads(keys) for kind, keys in parameters.items()}
    found = {
        kind: Attention(
            rope=replace(resolve_rope(keys, head_dim=head_dim, lengths=lengths), interleaved=interleaved),
            window=window if kind == "sliding_attention" else None,
            **(sizes | differences),
        )
        for kind, keys in parameters.items()
    }
    return {kind: replace(own, rope=None) if kind in without_rope else own for kind, own in found.items()}


def full_attention(fields: Fields, **differences: Any) -> Attention:
    """Attention of layers without windows; arguments as for `attention_by_kind`."""
    return attention_by_kind(fields, ("full_attention",), window=None, **differences)["full_attention"]


def all_windowed(fields: Fields, window: int | None) -> tuple[str, ...]:
    """The kind of attention of each layer, in a family in which all have a window or, where it is None, none has."""
    kind = "full_attention" if window is None else "sliding_attention"
    return layer_types(fields, [kind] * fields.integer("num_hidden_layers", maximum=MAX_LAYERS))


def _check_chunks(fields: Fields, longest: int) -> None:
    """Raises if sequences may be so long that positions start again in each chunk (Qwen2.5-1M)."""
    chunks = fields.mapping("dual_chunk_attention_config")
    own = Fields(chunks, name=f"{fields.name}: dual_chunk_attention_config")
    if chunks and longest > (limit := own.integer("original_max_position_embeddings")):
        problem = f"is not supported for sequences of more than {limit} tokens; set max_model_len to {limit} or less"
        raise fields.error("dual_chunk_attention_config", problem)


def rms(fields: Fields, *, plus_one: bool = False) -> RMS:
    """The norm of a family whose norms are all of one kind."""
    return RMS(fields.number("rms_norm_eps"), plus_one)


def layer_norm(fields: Fields, key: str = "layer_norm_eps", *, bias: bool = True) -> Layer:
    """Layer norm with the eps that a key gives."""
    return Layer(fields.number(key), bias)


def gated_mlp(fields: Fields, *, activation: str = "hidden_act", bias: bool = False) -> GatedMLP:
    """The feed-forward sublayer of a layer without experts.

    Args:
        activation: the key that names the activation.
    """
    inner = fields.integer("intermediate_size")
    return GatedMLP(inner=inner, activation=fields.choice(activation, ACTIVATIONS), bias=bias)


def mlp(fields: Fields, *, inner: int | None = None, activation: str = "hidden_act", bias: bool = True) -> MLP:
    """A feed-forward sublayer without a gate; arguments as for `gated_mlp`.

    Args:
        inner: None: ``intermediate_size``.
    """
    inner = inner or fields.integer("intermediate_size")
    return MLP(inner=inner, activation=fields.choice(activation, ACTIVATIONS), bias=bias)


def softmax_experts(fields: Fields, *, inner: str, normalize: bool, shared: str | None = None) -> Experts:
    """The experts of a family with a softmax router.

    Args:
        inner: the key of an expert's intermediate size.
        normalize: see ``Experts``.
        shared: the key of the shared expert's intermediate size; None: there is none.
    """
    # A key that the file has, then one that has a default.
    key = next((key for key in _EXPERT_COUNTS if fields.values.get(key) is not None), None)
    count = fields.integer(key or next(key for key in _EXPERT_COUNTS if key in fields.defaults))
    return Experts(
        count=count,
        per_token=experts_per_token(fields, count),
        inner=fields.integer(inner),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        normalize=normalize,
        shared=SharedExpert(inner=fields.integer(shared)) if shared else None,
    )


def experts_per_token(fields: Fields, count: int) -> int:
    """The number of experts, out of ``count``, that a token uses."""
    per_token = fields.integer("num_experts_per_tok")
    if per_token > count:
        raise fields.error("num_experts_per_tok", f"is more than there are experts, {count}")
    return per_token


def uniform_decoder(fields: Fields, layer: LayerSpec, **differences: Any) -> ModelConfig:
    """A model whose layers are all alike and have no windows; arguments as for `decoder_config`.

    Args:
        layer: spec of each layer; the final norm is its norm, unless ``differences`` have another one.
    """
    count = len(layer_types(fields, kinds=("full_attention",)))
    return decoder_config(fields, layers=[layer] * count, **{"norm": layer.norm, **differences})


def decoder_config(
    fields: Fields, *, layers: Sequence[LayerSpec], norm: NormSpec | None, **differences: Any
) -> ModelConfig:
    """A model from its layers and the other keys that every family has.

    Args:
        norm: the norm after the last layer.
        differences: fields of ModelConfig in which the family differs from its defaults.

    Raises:
        UnsupportedModel: a value is missing, wrong, contradictory or requires mathematics that is not implemented.
    """
    for key, neutral in _FOREIGN.items():
        if key not in fields.defaults:
            fields.require(key, *neutral)
    if not any(key in fields.defaults for key in _EXPERT_COUNTS):
        for key in _EXPERT_COUNTS:
            fields.require(key, 0)
    ropes = [layer.mixer.rope for layer in layers if layer.mixer.rope is not None]
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=tuple(layers),
        norm=norm,
        max_position=max((rope.max_position for rope in ropes), default=fields.integer("max_position_embeddings")),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        bos_token_id=fields.optional_integer("bos_token_id", minimum=0),
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=_dtype(fields),
        **differences,
    )


def _dtype(fields: Fields) -> str | None:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise fields.error(key, "must be a string")
    return value.removeprefix("torch.")
