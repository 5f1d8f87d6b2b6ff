"""Mixture-of-experts products of rows with adapters: each choice is of an expert and of a place.

In C++ what an adapter changes is added between the products of all experts in use. Elsewhere rows without an adapter go
through the experts as they are, and the others through a loop over blocks of rows that have chosen the same expert with
the same adapter.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from llmjax.kernels.activations import gated
from llmjax.kernels.adapted import NO_PLACE, Adapted, Delta, as_it_is
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.cpu import experts as cpu
from llmjax.kernels.dense_linear import LINEAR
from llmjax.kernels.experts import blocks_of, experts, one_of
from llmjax.kernels.linear import linear
from llmjax.kernels.loops import for_loop
from llmjax.kernels.registry import Implementation, Operation


def adapted_experts(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> jax.Array:
    """``llmjax.kernels.experts.experts`` with weights that are `Adapted`.

    Args:
        x: [T, D]; where tokens come several times, as inputs of one expert each, all those of a token stand together.
    """
    of = _places_of(weights)
    of = jnp.repeat(of, len(x) // len(of))
    wide = x.astype(jnp.float32)  # so that sums of both are rounded once
    out: jax.Array = ADAPTED_EXPERTS(wide, chosen, shares, _at(weights, of), activation=activation)
    return out.astype(x.dtype)


def adapted_experts_by_blocks(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> jax.Array:
    """`adapted_experts` of x in f32, with a place for each row."""
    alone = (_places_of(weights) == NO_PLACE)[:, None]
    out = experts(x, chosen, jnp.where(alone, shares, 0), _as_they_are(weights), activation=activation)
    return out + _with_adapters(x, chosen, jnp.where(alone, 0, shares), weights, activation=activation)


def _with_adapters(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> jax.Array:
    """The sums of rows with adapters, f32 [T, D]; others have no share."""
    projections = (weights.gate, weights.up, weights.down)
    places, count = _delta(weights.gate).a.shape[:2]  # adapters may be of more experts than the weights
    keys = (_places_of(weights)[:, None] - 1) * count + chosen
    blocks = blocks_of(jnp.maximum(keys, 0), shares, places * count)
    choices, flat_shares = chosen.shape[1], shares.reshape(-1)
    deltas = [_in_turn(_delta(projection)) for projection in projections]

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        key, rows, used = blocks.at(i)
        tokens = rows // choices
        one: ExpertWeights = one_of(_as_they_are(weights), key % count)
        gate, up, down = one_of(deltas, key)
        lower, upper = (_product(x[tokens], p, d) for p, d in ((one.gate, gate), (one.up, up)))
        made = _product(gated(activation, lower, upper), one.down, down)
        return out.at[tokens].add(jnp.where(used[:, None], made * flat_shares[rows, None], 0))

    return for_loop(0, blocks.count, add, jnp.zeros_like(x), most=blocks.most)


def _product(x: jax.Array, projection: Projection, delta: Delta) -> jax.Array:
    """A product of an expert, with what the adapter of these rows adds, f32."""
    shrunk = LINEAR(x, delta.a, None).astype(jnp.float32)
    added = jnp.dot(shrunk, delta.b.astype(jnp.float32), precision="highest")
    return linear(x, projection.weight, projection.bias) + added


def _places_of(weights: ExpertWeights) -> jax.Array:
    assert isinstance(weights.gate.weight, Adapted)
    return weights.gate.weight.places.of


def _delta(projection: Projection) -> Delta:
    assert isinstance(projection.weight, Adapted) and projection.weight.delta is not None
    return projection.weight.delta


def _in_turn(delta: Delta) -> Delta:
    """The matrices of adapters, [S * E, r, in] and [S * E, r, out]."""
    return replace(delta, a=delta.a.reshape(-1, *delta.a.shape[2:]), b=delta.b.reshape(-1, *delta.b.shape[2:]))


def _at(weights: ExpertWeights, of: jax.Array) -> ExpertWeights:
    """The weights for rows of these places."""

    def at(projection: Projection) -> Projection:
        assert isinstance(projection.weight, Adapted)
        return replace(projection, weight=projection.weight.at(of))

    return ExpertWeights(at(weights.gate), at(weights.up), at(weights.down))


def _as_they_are(weights: ExpertWeights) -> ExpertWeights:
    def plain(projection: Projection) -> Projection:
        return replace(projection, weight=as_it_is(projection.weight))

    return ExpertWeights(plain(weights.gate), plain(weights.up), plain(weights.down))


# Positional: x, chosen, shares, weights. Static: activation.
ADAPTED_EXPERTS = Operation(
    "experts with adapters",
    (
        Implementation("C++", cpu.experts, platform="cpu", refuses=cpu.refuses),
        Implementation("XLA, by blocks", adapted_experts_by_blocks),
    ),
)
