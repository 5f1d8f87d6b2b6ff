"""A decoder layer in the order in which it is calibrated: which projections share an input, and what makes it.

This is all that calibration knows of models; whatever is a `DecoderLayer` can be calibrated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from llmjax.kernels.attention import KVPages, RaggedBatch
from llmjax.kernels.rope import Rotation
from llmjax.models.decoder import DecoderLayer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Surroundings:
    """What a layer needs beside its input."""

    by: Rotation
    pages: KVPages
    batch: RaggedBatch


Computation = Callable[[DecoderLayer, jax.Array, Surroundings], jax.Array]
"""Something that a layer computes from the residual stream [T, D]."""


@dataclass(frozen=True)
class Stage:
    """Projections with the same input.

    Attributes:
        modules: below the layer.
        inputs: computes their input, [T, in].
        source: the module whose outputs it is, channel by channel, so that scales can be folded into it.
    """

    modules: tuple[str, ...]
    inputs: Computation
    source: str


@dataclass(frozen=True)
class Block:
    """Half a layer.

    Attributes:
        stages: in order.
        outputs: computes the residual stream behind it.
    """

    stages: tuple[Stage, ...]
    outputs: Computation


def blocks_of(layer: DecoderLayer) -> tuple[Block, ...]:
    """Attention and MLP."""
    mlp_norm = "post_attention_layernorm" if layer.pre_feedforward_layernorm is None else "pre_feedforward_layernorm"
    attention = Block(
        (
            Stage(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), _attention_input, "input_layernorm"),
            Stage(("self_attn.o_proj",), _heads, "self_attn.v_proj"),
        ),
        _attention_output,
    )
    mlp = Block(
        (
            Stage(("mlp.gate_proj", "mlp.up_proj"), _mlp_input, mlp_norm),
            Stage(("mlp.down_proj",), _inner, "mlp.up_proj"),
        ),
        _mlp_output,
    )
    return attention, mlp


def _attention_input(layer: DecoderLayer, x: jax.Array, around: Surroundings) -> jax.Array:
    return layer.input_layernorm(x)


def _heads(layer: DecoderLayer, x: jax.Array, around: Surroundings) -> jax.Array:
    return layer.self_attn.heads(x, around.by, around.pages, around.batch, before=layer.input_layernorm)[0]


def _attention_output(layer: DecoderLayer, x: jax.Array, around: Surroundings) -> jax.Array:
    return layer.attend(x, around.by, around.pages, around.batch)[0]


def _mlp_input(layer: DecoderLayer, x: jax.Array, around: Surroundings) -> jax.Array:
    return layer.mlp_norm(x)


def _inner(layer: DecoderLayer, x: jax.Array, around: Surroundings) -> jax.Array:
    return layer.mlp.inner(x, before=layer.mlp_norm)


def _mlp_output(layer: DecoderLayer, x: jax.Array, around: Surroundings) -> jax.Array:
    return layer.feed_forward(x, around.batch)
