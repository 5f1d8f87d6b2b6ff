"""Ragged work for a grid of fixed size: groups of items, each cut into blocks, a program for each block."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


def num_blocks(groups: int, *, size: int, most: int) -> int:
    """Programs for any division of at most so many items among groups."""
    return most // size + min(groups, most)


@dataclass(frozen=True)
class Blocks:
    """Which block each program has; worked out by XLA without loops, with shapes that do not depend on the counts."""

    group: jax.Array  # i32 [programs]
    first: jax.Array  # i32 [programs], its first item within the group; not below the count where there is no work

    @classmethod
    def of(cls, count: jax.Array, *, size: int, most: int) -> Blocks:
        """Cuts each group's items into blocks.

        Args:
            count: i32 [groups], items of each.
            size: of a block.
            most: items that all groups have together at most.
        """
        blocks = (count + (size - 1)) // size
        ends = jnp.cumsum(blocks)  # up to and with each group's
        program = jnp.arange(num_blocks(len(count), size=size, most=most), dtype=jnp.int32)
        after = jnp.searchsorted(ends, program, side="right", method="compare_all")
        group = jnp.minimum(after, len(count) - 1).astype(jnp.int32)
        return cls(group, ((program - (ends - blocks)[group]) * size).astype(jnp.int32))
