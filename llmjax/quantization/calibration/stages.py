"""A decoder layer in the order in which it is calibrated: which projections share an input, and what makes it.

This is all that calibration knows of models; whatever is a `DecoderLayer` can be calibrated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from llmjax.models.layers.context import Context
from llmjax.models.layers.layer import DecoderLayer
from llmjax.models.layers.residual import normed

Computation = Callable[[DecoderLayer, jax.Array, Context], jax.Array]
"""Something that a layer computes from the residual stream [T, D]."""


@dataclass(frozen=True)
class Stage:
    """Projections with the same input.

    Attributes:
        modules: below the layer.
        inputs: computes their input, [T, in].
        source: the module whose outputs it is, channel by channel, so that scales can be folded into it; None: there
            is none.
    """

    modules: tuple[str, ...]
    inputs: Computation
    source: str | None


@dataclass(frozen=True)
class Half:
    """Half a layer.

    Attributes:
        stages: in order.
        outputs: computes the residual stream behind it.
    """

    stages: tuple[Stage, ...]
    outputs: Computation


def halves_of(layer: DecoderLayer) -> tuple[Half, ...]:
    """Attention and MLP."""
    norms = layer.spec.residual
    attention = Half(
        (
            Stage(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), _attention_input, norms.before_mixer),
            Stage(("self_attn.o_proj",), _heads, "self_attn.v_proj"),
        ),
        _attention_output,
    )
    mlp = Half(
        (
            Stage(("mlp.gate_proj", "mlp.up_proj"), _mlp_input, norms.before_feed_forward),
            Stage(("mlp.down_proj",), _inner, "mlp.up_proj"),
        ),
        _mlp_output,
    )
    return attention, mlp


def _attention_input(layer: DecoderLayer, x: jax.Array, context: Context) -> jax.Array:
    return normed(x, layer.norm(layer.spec.residual.before_mixer))


def _heads(layer: DecoderLayer, x: jax.Array, context: Context) -> jax.Array:
    heads: jax.Array = layer.mixer.heads(_attention_input(layer, x, context), context)[0]
    return heads


def _attention_output(layer: DecoderLayer, x: jax.Array, context: Context) -> jax.Array:
    return layer.mix(x, context)[0]


def _mlp_input(layer: DecoderLayer, x: jax.Array, context: Context) -> jax.Array:
    return normed(x, layer.norm(layer.spec.residual.before_feed_forward))


def _inner(layer: DecoderLayer, x: jax.Array, context: Context) -> jax.Array:
    inner: jax.Array = layer.part.inner(_mlp_input(layer, x, context))
    return inner


def _mlp_output(layer: DecoderLayer, x: jax.Array, context: Context) -> jax.Array:
    return layer.feed_forward(x, context)
