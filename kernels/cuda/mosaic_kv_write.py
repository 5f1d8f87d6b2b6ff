"""Storing keys and values by Mosaic GPU: the kernel of `kv_write.py` that does not need Triton, for every card since
Ampere.

A thread stores 16 bytes of a record. With scales, lanes that have numbers of one token and head find the largest
magnitude together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import LEAST_AMAX, KVLayout, KVPages, RaggedBatch
from llmjax.kernels.cuda.lowering import power_of_2
from llmjax.kernels.cuda.pages import ROUNDER, first_page
from llmjax.kernels.cuda.threads import THREADS, Threads, launch, refuses_card

BYTES = 16  # of a record, that a thread stores
HALVES = (jnp.bfloat16, jnp.float16)


def refuses(k: jax.Array, pages: KVPages) -> str | None:
    """Why the kernel does not take these; None: it does."""
    layout, lanes = pages.layout, k.shape[2] * pages.dtype.itemsize // BYTES
    if k.shape[2] * pages.dtype.itemsize % BYTES:
        return f"a record of {k.shape[2]} numbers is not a multiple of {BYTES} bytes"
    if k.dtype not in HALVES:
        return f"keys are {k.dtype}"
    if layout.token_scales:
        if layout.dtype != jnp.int8:
            return f"pages are {layout.dtype}"
        if lanes > 32 or lanes != power_of_2(lanes):
            return f"records of {k.shape[2]} bytes do not fill a number of lanes that is a power of two up to 32"
    elif pages.data.dtype != k.dtype:
        return f"keys are {k.dtype}, pages {layout.dtype}"
    return refuses_card()


def write_kv(
    pages: KVPages, k: jax.Array, v: jax.Array | None, batch: RaggedBatch, *, interpret: bool = False
) -> KVPages:
    """`llmjax.kernels.cuda.kv_write.write_kv`, as far as `refuses` allows."""
    tokens, kv_heads, head_dim = k.shape
    parts = [k] if v is None else [k, v]
    kernel = _Store(Threads(interpret), pages.layout, k.dtype, tokens, kv_heads, head_dim)
    data = launch(
        "store",
        kernel,
        jax.ShapeDtypeStruct((pages.data.size,), pages.data.dtype),
        [batch.kv_index, first_page(batch), *(part.reshape(-1) for part in parts)],
        grid=(-(-tokens * kv_heads * kernel.lanes // THREADS), 1, 1),
        in_place=pages.data.reshape(-1),
        interpret=interpret,
    )
    return pages.with_data(data.reshape(pages.data.shape))


@dataclass(frozen=True)
class _Store:
    threads: Threads
    layout: KVLayout
    dtype: jnp.dtype  # of keys and values
    tokens: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Numbers of a thread."""
        return BYTES // self.layout.dtype.itemsize

    @property
    def lanes(self) -> int:
        """Lanes that store a token's record of a head."""
        return self.head_dim // self.width

    def __call__(self, place: Sequence[jax.Array], kv_index: Any, first: Any, *refs: Any) -> None:
        """kv_index: i32 [T]; first: i32 [1]; then keys and values, [T * K * h], and the result, of pages."""
        threads, layout, data = self.threads, self.layout, refs[-1]
        item = place[0] * THREADS + threads.index()
        lane = jax.lax.rem(item, np.int32(self.lanes))
        # Threads after the last record repeat it.
        record = jnp.minimum(jax.lax.div(item, np.int32(self.lanes)), self.tokens * self.kv_heads - 1)
        token, head = (f(record, np.int32(self.kv_heads)) for f in (jax.lax.div, jax.lax.rem))
        index = threads.look_up(kv_index, token)
        page, offset = (f(index, np.int32(layout.page_size)) for f in (jax.lax.div, jax.lax.rem))
        size = layout.rows(self.head_dim) * self.head_dim  # of a head's record of a page
        where: Any = {"block": first[0] + page, "of": layout.parts * self.kv_heads * size}
        for part, ref in enumerate(refs[:-1]):
            words, scale = self._stored(ref, record * self.head_dim + self.width * lane)
            start = (part * self.kv_heads + head) * size
            threads.store(data, start + offset * self.head_dim + self.width * lane, words, **where)
            if scale is not None:
                threads.store_first(data, start + layout.page_size * self.head_dim + 4 * offset, scale, **where)

    def _stored(self, ref: Any, at: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """16 bytes of a record, quads u32, and the scale of its token, f32 quads of four equal numbers."""
        threads = self.threads
        if not self.layout.token_scales:
            return threads.load(ref, at), None
        pairs = [threads.load(ref, at, further) for further in (0, 8)]
        numbers = [each for pair in pairs for each in threads.floats(pair, self.dtype)]
        sizes = [jnp.maximum(each, 0.0 - each) for each in numbers]
        largest = jnp.maximum(jnp.maximum(*sizes[:2]), jnp.maximum(*sizes[2:]))
        lanes = [1 << bit for bit in range(self.lanes.bit_length() - 1)]
        # As `KVLayout.scaled` has it, to the last bit.
        most = self.layout.max_value
        scale = jnp.maximum(threads.reduced([largest], "max", lanes), LEAST_AMAX) * (1 / most)
        inverse = 1 / scale
        scaled = [jnp.minimum(jnp.maximum(each * inverse, -most), most) for each in numbers]
        codes = [jax.lax.bitcast_convert_type(each + ROUNDER, jnp.uint32) & np.uint32(0xFF) for each in scaled]
        twos = [codes[i] | codes[i + 1] << np.uint32(8) for i in (0, 2)]  # [i] are numbers 2 * i and 2 * i + 1
        low, high = (threads.arranged(twos, [(0, i), (0, i + 2), (1, i), (1, i + 2)]) for i in (0, 1))
        return low | high << np.uint32(16), scale
