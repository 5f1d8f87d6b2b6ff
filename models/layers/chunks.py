"""Attention within chunks of a sequence (Llama 4): a query sees the keys of its own chunk.

Kernels see each chunk as a sequence of its own: a row whose tokens are in several chunks becomes several rows, and its
pages begin where the chunk does. Layers without rope may scale their queries by position instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import RaggedBatch
from llmjax.models.errors import UnsupportedModel


def by_chunk(batch: RaggedBatch, chunk: int, *, page_size: int) -> RaggedBatch:
    """The batch with a row for each chunk that a row's tokens may be in; some of these rows may be empty.

    Args:
        chunk: tokens in a chunk, a multiple of ``page_size``.
        page_size: tokens in a page.

    Raises:
        UnsupportedModel: a chunk is not a whole number of pages.
    """
    if chunk % page_size:
        raise UnsupportedModel(f"attention_chunk_size = {chunk} is not a multiple of page_size = {page_size}")
    tokens = len(batch.kv_index)
    parts = 1 if batch.decode else -(-(tokens - 1) // chunk) + 1  # the most chunks that consecutive tokens may touch
    counts = batch.query_start[1:] - batch.query_start[:-1]
    first = batch.kv_len - counts  # positions of the rows' first tokens
    chunks = (first // chunk)[:, None] + jnp.arange(parts)  # [R, parts]
    begins = jnp.clip(chunks * chunk - first[:, None], 0, counts[:, None])  # among the row's tokens
    ends = jnp.clip((chunks + 1) * chunk - first[:, None], 0, counts[:, None])
    is_there = (ends > begins) & (batch.kv_len > 0)[:, None]
    lengths = jnp.where(is_there, first[:, None] + ends - chunks * chunk, 0)
    starts = (batch.query_start[:-1, None] + begins).reshape(-1)
    columns = (chunks * (chunk // page_size))[..., None] + jnp.arange(
        min(chunk // page_size, batch.page_table.shape[1])
    )
    inside = jnp.minimum(columns, batch.page_table.shape[1] - 1).reshape(len(counts), -1)
    table = jnp.take_along_axis(batch.page_table, inside, axis=1)
    return replace(
        batch,
        query_start=jnp.append(starts, batch.query_start[-1]),
        kv_len=lengths.reshape(-1),
        page_table=table.reshape(len(counts) * parts, -1),
    )


@dataclass(frozen=True)
class Sharpening:
    """A factor of queries that grows with their position p: ``1 + scale log(1 + floor((p + ahead) / floor))``."""

    floor: int  # tokens
    scale: float
    ahead: int = 1

    def factors(self, batch: RaggedBatch) -> jax.Array:
        """f32 [T]."""
        steps = jnp.maximum(jnp.floor((batch.positions + self.ahead).astype(jnp.float32) / self.floor), 0)
        return jnp.log1p(steps) * self.scale + 1
