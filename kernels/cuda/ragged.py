"""Ragged work for a grid of fixed size: groups of items, each cut into blocks, a program for each block."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


def num_blocks(groups: int, *, size: int, most: int) -> int:
    """Programs that suffice for any division of at most ``most`` items among groups."""
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
            size: items of a block.
            most: items that all groups have together at most.
        """
        group, number = deal((count + (size - 1)) // size, programs=num_blocks(len(count), size=size, most=most))
        return cls(group, number * size)


def deal(blocks: jax.Array, *, programs: int) -> tuple[jax.Array, jax.Array]:
    """Each program's group, and which of the group's blocks it has; i32 [programs].

    Args:
        blocks: i32 [groups], how many each has; together no more than there are programs. Those that get none are
            given to the last group, after its blocks.
    """
    ends = jnp.cumsum(blocks)  # up to and with each group's
    program = jnp.arange(programs, dtype=jnp.int32)
    after = jnp.searchsorted(ends, program, side="right", method="compare_all")
    group = jnp.minimum(after, len(blocks) - 1).astype(jnp.int32)
    return group, (program - (ends - blocks)[group]).astype(jnp.int32)
