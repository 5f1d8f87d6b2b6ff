"""Where a step's states are read and written.

States are entries of an array. The state after a token is in the entry that the page table names for the token's page:
tokens of a page rewrite it in place, and the first token of the next page reads it and writes the next page's entry.
Pages that follow each other may share an entry. What is left in one when a row goes on to another is a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import RaggedBatch


@dataclass(frozen=True)
class Places:
    """Entries of a step's rows; letters as in ``llmjax.kernels.attention``."""

    batch: RaggedBatch
    page_size: int

    def entry(self, row: jax.Array, position: jax.Array) -> jax.Array:
        """The entry of the state after the token at ``position`` (any value before the first token's) of ``row``."""
        page = jnp.clip(position // self.page_size, 0, self.batch.page_table.shape[1] - 1)
        return self.batch.first_page + self.batch.page_table[row, page]

    @property
    def counts(self) -> jax.Array:
        """Tokens of each row, i32 [R]."""
        return self.batch.query_start[1:] - self.batch.query_start[:-1]

    @property
    def single(self) -> jax.Array:
        """Rows of one token, bool [R]."""
        return (self.batch.kv_len > 0) & (self.counts == 1)

    def single_entries(self, num_entries: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rows of one token: where the state is read and written (i32 [R] each), and whether there is none yet.

        Other rows write to ``num_entries``, which does not exist.
        """
        rows, last = jnp.arange(len(self.batch.kv_len)), self.batch.kv_len - 1
        write = jnp.where(self.single, self.entry(rows, last), num_entries)
        return self.entry(rows, last - 1), write, last <= 0

    def longer_rows(self) -> tuple[jax.Array, jax.Array]:
        """Rows of several tokens: their numbers, i32 [R], then those of other rows, and how many there are."""
        longer = self.counts > 1
        return jnp.argsort(~longer, stable=True), longer.sum()

    def piece(self, row: jax.Array, at: jax.Array, *, longest: int) -> jax.Array:
        """How many tokens of a row from position ``at`` on share an entry, at most ``longest``."""
        following = at + jnp.arange(1, longest + 1)
        ends = (following >= self.batch.kv_len[row]) | (self.entry(row, following) != self.entry(row, following - 1))
        return jnp.where(ends.any(), jnp.argmax(ends) + 1, longest)


# A single entry is read and written beside another one, which is dropped: XLA would read it anew wherever it is used,
# even after the write, and copy all states for that.


def read_entries(states: jax.Array, entry: jax.Array) -> jax.Array:
    """Entries (i32 [R]) of states [N, ...]."""
    return states[jnp.append(entry, entry)][:1] if len(entry) == 1 else states[entry]


def write_entries(states: jax.Array, entry: jax.Array, new: jax.Array) -> jax.Array:
    """The states with new ones, [R, ...], at entries, i32 [R]; those at N are left out."""
    if len(entry) == 1:
        entry, new = jnp.append(entry, len(states)), jnp.concatenate((new, new))
    return states.at[entry].set(new, mode="drop")
