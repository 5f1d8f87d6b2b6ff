"""The state of each slot's sequence on the device; the host sends only its changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.arrays import Ints
from llmjax.engine.core.request import Sequence
from llmjax.sampling.settings import SETTINGS_WORDS, RequestSampling

ENDED = -1  # in ``last_token``: the slot's sequence has ended; steps already planned for it compute nothing
MAX_STOPS = 8  # most stop ids of a row on the device; the host finds further ones, a dispatch later
NO_STOP = -1  # in ``stops``: no id

ROW = np.dtype(
    [
        ("prompt_len", np.int32),  # some RoPE scalings depend on it
        ("second_start", np.int32),  # where the second text of a pair begins
        ("min_len", np.int32),  # tokens that stand before the first one that may end the sequence
        ("stops", np.int32, MAX_STOPS),  # ids that end it; NO_STOP where there are fewer
        ("sampling", np.int32, SETTINGS_WORDS),  # ``RequestSampling.words``
        ("adapter", np.int32),  # the place of its adapter; 0: the weights as they are
    ]
)
ROW_WORDS = ROW.itemsize // 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """The state of every slot. S slots, G groups of layers, P pages a sequence."""

    last_token: jax.Array  # i32 [S], the token sampled last, or ENDED
    length: jax.Array  # i32 [S], tokens that the layers have computed
    words: jax.Array  # i32 [S, ROW_WORDS], constant fields: ``ROW`` as integers
    page_tables: jax.Array  # i32 [G, S, P]

    def word(self, name: str, slot: jax.Array) -> jax.Array:
        """A field of ``ROW``, of the slots ([R]): i32 [R], or [R, size of the field]."""
        assert ROW.fields is not None
        dtype, offset, *_ = ROW.fields[name]
        words = self.words[slot, offset // 4 : (offset + dtype.itemsize) // 4]
        return words if dtype.shape else words[:, 0]


def make_row_state(*, num_slots: int, num_groups: int, pages_per_sequence: int) -> RowState:
    """Slots without a sequence."""
    return RowState(
        last_token=jnp.zeros(num_slots, jnp.int32),
        length=jnp.zeros(num_slots, jnp.int32),
        words=jnp.zeros((num_slots, ROW_WORDS), jnp.int32),
        page_tables=jnp.zeros((num_groups, num_slots, pages_per_sequence), jnp.int32),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowChanges:
    """The changes that a step brings: any number of new rows and of table entries. Those without a slot or a place
    are left out."""

    slot: jax.Array  # i32 [N], of sequences that get it now; num_slots: none
    length: jax.Array  # i32 [N], tokens of theirs that were found in the cache
    words: jax.Array  # i32 [N, ROW_WORDS]
    entry: jax.Array  # i32 [U], places in the flat ``page_tables``; their size: none
    page: jax.Array  # i32 [U]

    def made(self, rows: RowState) -> RowState:
        """The rows after the changes; applying them again changes nothing."""
        return replace(
            rows,
            length=rows.length.at[self.slot].set(self.length, mode="drop"),
            words=rows.words.at[self.slot].set(self.words, mode="drop"),
            page_tables=write_pages(rows.page_tables, self.entry, self.page),
        )


def write_pages(page_tables: jax.Array, entry: jax.Array, page: jax.Array) -> jax.Array:
    """Page tables [G, S, P] with new pages at flat places (i32 [U] each); places after the end are left out."""
    return page_tables.reshape(-1).at[entry].set(page, mode="drop").reshape(page_tables.shape)


@dataclass(frozen=True)
class NewRow:
    """On the host: a slot that has got another sequence."""

    slot: int
    length: int  # tokens that were found in the cache
    words: Ints  # [ROW_WORDS]
    delta: int = 0  # what the positions of its tokens are moved by, because there are images before them


def row_words(sequence: Sequence, sampling: RequestSampling) -> Ints:
    """``ROW`` of a sequence as integers [ROW_WORDS]."""
    request = sequence.request
    row = np.zeros((), ROW)
    row["prompt_len"] = sequence.num_prompt_tokens
    row["second_start"] = request.pooling.second_start if request.pooling is not None else sequence.end
    row["min_len"] = sequence.num_prompt_tokens + request.params.min_tokens
    stops = sorted(request.stop_token_ids)[:MAX_STOPS]
    row["stops"] = [*stops, *[NO_STOP] * (MAX_STOPS - len(stops))]
    row["sampling"] = sampling.words
    row["adapter"] = sequence.adapter_slot
    return row.reshape(1).view(np.int32)
