"""How the keys of rows with one query are dealt out among programs.

Flash decoding (Dao et al. 2023): one program for each row and key/value head would leave most of a card idle, and the
longest row would keep the others waiting. So the keys that all rows see are divided evenly, by how long rows really
are: a long row becomes as many parts as it needs, a short one stays whole and is done when its program is.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from llmjax.kernels.attention.types import KVPages
from llmjax.kernels.cuda.flash import QueryRules
from llmjax.kernels.cuda.lowering import MIN_DOT, has_triton, power_of_2
from llmjax.kernels.cuda.pages import MAX_HEAD_DIM, PageReader
from llmjax.kernels.cuda.ragged import deal
from llmjax.kernels.cuda.tuned import Key, little_shared_memory

ENOUGH_PROGRAMS = 512
MAX_HEADS = 64  # that a program takes
WHOLE, IDLE = -1, -2  # in place of a part's number: the program has all of a row, or nothing


@dataclass(frozen=True)
class Split:
    """How the keys of all rows are divided.

    Args:
        shares: parts of all blocks of keys, of which a program takes at most one; there is a program for each, and one
            for each row, for each block of heads.
        heads: query heads of a key/value head that a program takes; a power of two.
        keys: keys of a block, which a program reads at a time.
        warps: warps of a program.
        stages: stages of its loop's software pipeline.
        mosaic: 1: `mosaic_decode` does it, where it takes the arguments; warps and stages then mean nothing.
    """

    shares: int
    heads: int
    keys: int
    warps: int = 4
    stages: int = 2
    mosaic: int = 0

    @classmethod
    def of(cls, group: int, pages: KVPages, reader: PageReader) -> Split:
        """The division for ``group`` query heads a key/value head."""
        wide = reader.padded_dim > MAX_HEAD_DIM
        most = MAX_HEADS if not wide else MIN_DOT if reader.exact and little_shared_memory() else 2 * MIN_DOT
        heads = min(most, max(MIN_DOT, power_of_2(group)))
        enough = ENOUGH_PROGRAMS // 4 if wide else ENOUGH_PROGRAMS  # larger ones, and more to merge from each
        shares = -(-enough // (pages.data.shape[2] * -(-group // heads)))
        return cls(shares, heads, reader.block, warps=8 if wide else 4, mosaic=int(not has_triton()))

    @staticmethod
    def key(q: jax.Array, pages: KVPages, reader: PageReader) -> Key:
        """What the table of a card knows it by; how long requests may get says little about how long they are."""
        return Key.of("decode", reader.name, *q.shape[:2], pages.data.shape[2])


@dataclass(frozen=True)
class Parts:
    """Which keys each program has: worked out by XLA, once for all layers that see alike.

    A part is as many blocks as one of ``shares`` equal shares of all rows' blocks, or what is left of its row. So no
    program has more than a share, and there are at most as many parts as rows and shares together.
    """

    programs: jax.Array  # i32 [programs, 4]: row, first key, key after the last, number of the part, WHOLE or IDLE
    rows: jax.Array  # i32 [R, 2]: number of a row's first part, and how many there are to be merged
    most: int  # parts that rows of several have together

    @classmethod
    def of(cls, kv_len: jax.Array, rules: QueryRules, split: Split, *, most_keys: int) -> Parts:
        """For queries at the ends of rows.

        Args:
            kv_len: i32 [R]; rows of 0 have a program that finds nothing.
            most_keys: keys that a query sees at most.
        """
        rows, most_blocks = len(kv_len), -(-most_keys // split.keys)
        first = rules.first_key(kv_len - 1)
        blocks = (jnp.maximum(kv_len - first, 0) + (split.keys - 1)) // split.keys
        size = jnp.maximum((blocks.sum(dtype=jnp.int32) + (split.shares - 1)) // split.shares, 1)
        parts = jnp.maximum((blocks + (size - 1)) // size, 1)
        # ceil(a) <= a + 1, and twice as many for those that are more than one.
        row, number = deal(parts, programs=min(rows + split.shares, rows * most_blocks))
        several = jnp.where(parts > 1, parts, 0)
        first_part = jnp.cumsum(several) - several
        start = first[row] + number * size * split.keys
        stop = jnp.minimum(start + size * split.keys, kv_len[row])
        part = jnp.where(parts[row] > 1, first_part[row] + number, WHOLE)
        idle = number >= parts[row]
        programs = jnp.stack([row, start, jnp.where(idle, start, stop), jnp.where(idle, IDLE, part)], 1)
        most = min(2 * split.shares, rows * most_blocks) if most_blocks > 1 else 0
        return cls(programs.astype(jnp.int32), jnp.stack([first_part, several], 1).astype(jnp.int32), most)
