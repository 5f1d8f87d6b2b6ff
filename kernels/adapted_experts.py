"""Mixture-of-experts products of rows with adapters: each choice is of an expert and of a place."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from llmjax.kernels.activations import gated
from llmjax.kernels.adapted import NO_PLACE, Adapted, Delta, Places
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.dense_linear import LINEAR
from llmjax.kernels.experts import blocks_of, experts, one_of
from llmjax.kernels.linear import linear
from llmjax.kernels.loops import for_loop


def adapted_experts(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> jax.Array:
    """``llmjax.kernels.experts.experts`` with weights that are `Adapted`: rows without an adapter take its way, the
    others a loop over blocks of rows that have chosen the same expert with the same adapter.

    Args:
        x: [T, D]; where tokens come several times, as inputs of one expert each, all those of a token stand together.
    """
    first = weights.up.weight
    assert isinstance(first, Adapted)
    of = jnp.repeat(first.places.of, len(x) // len(first.places.of))
    alone = (of == NO_PLACE)[:, None]
    wide = x.astype(jnp.float32)  # so that sums of both are rounded once
    out = experts(wide, chosen, jnp.where(alone, shares, 0), _as_they_are(weights), activation=activation)
    places = replace(first.places, of=of)
    shares = jnp.where(alone, 0, shares)
    out = out + _by_blocks(wide, chosen, shares, weights, places, activation=activation)
    return out.astype(x.dtype)


def _by_blocks(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    weights: ExpertWeights,
    places: Places,
    *,
    activation: str,
) -> jax.Array:
    """The sums of rows with adapters, f32 [T, D]."""
    count = weights.count
    keys = (places.of[:, None] - 1) * count + chosen
    blocks = blocks_of(jnp.maximum(keys, 0), shares, places.count * count)
    choices, flat_shares = chosen.shape[1], shares.reshape(-1)
    projections = (weights.gate, weights.up, weights.down)
    deltas = [_in_turn(projection) for projection in projections]

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
    added: jax.Array = LINEAR(shrunk, delta.b.astype(jnp.float32), None)
    return linear(x, projection.weight, projection.bias) + added.astype(jnp.float32)


def _in_turn(projection: Projection) -> Delta:
    """The matrices of adapters, [S * E, r, in] and [S * E, out, r]."""
    assert isinstance(projection.weight, Adapted) and projection.weight.delta is not None
    delta = projection.weight.delta
    return replace(delta, a=delta.a.reshape(-1, *delta.a.shape[2:]), b=delta.b.reshape(-1, *delta.b.shape[2:]))


def _as_they_are(weights: ExpertWeights) -> ExpertWeights:
    def plain(projection: Projection) -> Projection:
        weight = projection.weight
        return replace(projection, weight=weight.weight if isinstance(weight, Adapted) else weight)

    return ExpertWeights(plain(weights.gate), plain(weights.up), plain(weights.down))
