"""Mixture-of-experts products: each token goes through the few feed-forward networks that its router chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from llmjax.kernels.activations import gated
from llmjax.kernels.blocks import ExpertWeights
from llmjax.kernels.cpu import experts as cpu
from llmjax.kernels.linear import linear
from llmjax.kernels.loops import for_loop
from llmjax.kernels.registry import Implementation, Operation, later

CUDA = "llmjax.kernels.cuda.experts"  # Pallas is a tenth of what a start would import

Tree = TypeVar("Tree")

MOST_ROWS = 256  # of a block: beyond it a product is no faster per row, and its temporaries only grow


def experts(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> jax.Array:
    """The sum over a token's choices of share * expert(x), accumulated in f32; products are those of ``linear``.

    Args:
        x: [T, D].
        chosen: i32 [T, K], the expert of each choice, 0 to E - 1.
        shares: f32 [T, K]; a choice with share 0 adds nothing, and its expert need not be read.
        activation: as in ``llmjax.kernels.activations.gated``.

    Returns:
        [T, D] in x's dtype.
    """
    out: jax.Array = EXPERTS(x, chosen, shares, weights, activation=activation)
    return out


def experts_by_blocks(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> jax.Array:
    """``experts`` with choices sorted by expert, a block of rows of one expert at a time.

    The loop ends with the last block in use, so only experts in use are read, and only one is dequantized at a time.
    """
    blocks = blocks_of(chosen, shares, weights.count)
    choices, flat_shares = chosen.shape[1], shares.reshape(-1)

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        expert, rows, used = blocks.at(i)
        tokens = rows // choices
        expert_weights = one_of(weights, expert)
        lower, upper = (linear(wide[tokens], p.weight, p.bias) for p in (expert_weights.gate, expert_weights.up))
        made = linear(gated(activation, lower, upper), expert_weights.down.weight, expert_weights.down.bias)
        return out.at[tokens].add(jnp.where(used[:, None], made * flat_shares[rows, None], 0))

    wide = x.astype(jnp.float32)
    out = for_loop(0, blocks.count, add, jnp.zeros_like(wide), most=blocks.most)
    return out.astype(x.dtype)


@dataclass(frozen=True)
class Blocks:
    """Choices sorted by expert, each expert's cut into blocks of ``size``; the last block of each may not be full."""

    order: jax.Array  # i32 [T * K], the choice (token * K + k) at each place
    starts: jax.Array  # i32 [E], the place of each expert's first choice
    counts: jax.Array  # i32 [E], choices
    ends: jax.Array  # i32 [E], blocks up to and with the expert's
    size: int

    @property
    def count(self) -> jax.Array:
        """Blocks."""
        return self.ends[-1]

    @property
    def most(self) -> int:
        """Blocks there may be: none is empty, and one of each expert is not full."""
        choices = len(self.order)
        return min(choices, choices // max(1, self.size) + len(self.counts))

    def at(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Expert, choices i32 [size] and which of them count, of block i."""
        expert = jnp.searchsorted(self.ends, i, side="right")
        before = self.ends[expert] - (self.counts[expert] + self.size - 1) // self.size
        within = (i - before) * self.size + jnp.arange(self.size)
        place = jnp.minimum(self.starts[expert] + within, len(self.order) - 1)
        return expert, self.order[place], within < self.counts[expert]


def blocks_of(chosen: jax.Array, shares: jax.Array, num_experts: int) -> Blocks:
    """Choices in blocks; its arguments are those of `experts`."""
    # What has no share is sorted after the last expert.
    keys = jnp.where(shares == 0, num_experts, chosen).reshape(-1)
    counts = jnp.bincount(keys, length=num_experts)
    # Twice the mean, so that most experts fill one block, and an even choice wastes at most half of it.
    size = min(MOST_ROWS, len(chosen), 1 << (2 * len(keys) // num_experts).bit_length())
    return Blocks(
        order=jnp.argsort(keys),
        starts=jnp.cumsum(counts) - counts,
        counts=counts,
        ends=jnp.cumsum((counts + size - 1) // size),
        size=size,
    )


def one_of(weights: Tree, expert: jax.Array) -> Tree:
    """The matrices of one expert, without the leading dimension, from a tree of stacks."""

    def slice_of(leaf: jax.Array) -> jax.Array:
        # XLA on a CPU would widen a whole stack of bfloat16 to slice it.
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16) if leaf.dtype == jnp.bfloat16 else leaf
        one = jax.lax.dynamic_index_in_dim(bits, expert, axis=0, keepdims=False)
        return jax.lax.bitcast_convert_type(one, leaf.dtype)

    # It would also move what does not depend on the loop out of it, and copy stacks there.
    weights, expert = jax.lax.optimization_barrier((weights, expert))
    one: Tree = jax.tree.map(slice_of, weights)
    return one


# Positional: x, chosen, shares, weights. Static: activation.
EXPERTS = Operation(
    "experts",
    (
        Implementation("C++", cpu.experts, platform="cpu", refuses=cpu.refuses),
        Implementation("Pallas", later(CUDA, "experts"), platform="cuda", refuses=later(CUDA, "refuses")),
        Implementation("XLA, by blocks", experts_by_blocks),
    ),
)
