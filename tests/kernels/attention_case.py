"""Ragged batches with random contents, for the tests of every implementation of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention import RaggedBatch, reference
from llmjax.kernels.attention.types import KVPages, make_pages


@dataclass(frozen=True)
class Case:
    """Rows are (new tokens, length after them); (0, 0) is an empty row."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    cache: str = "float32"
    activations: str = "float32"
    window: int | None = None
    causal: bool = True
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False  # ALiBi
    decode: bool = False
    calibration: tuple[tuple[float, float], ...] | None = None  # (scale, zero) of keys, of values
    value_dim: int | None = None  # of latent pages
    padding: int = 3  # tokens and rows that belong to nobody
    common: int = 0  # leading tokens of all rows, which are on the same pages
    first_page: int = 2  # pages of other layers before

    @property
    def num_pages(self) -> int:
        """The dummy page, those of the rows and two that nobody has; more where rows share some."""
        return 3 + sum(-(-kv // self.page_size) for _, kv in self.lengths)

    @property
    def all_pages(self) -> int:
        """Pages of all layers."""
        return self.first_page + self.num_pages


@dataclass(frozen=True)
class Data:
    """Arguments of ``attend``, and what fills the pages before; NumPy arrays: only what is compiled takes time."""

    case: Case
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray | None
    filling: np.ndarray  # [2, every slot, K, h]
    batch: RaggedBatch
    rules: dict[str, Any]
    sinks: np.ndarray | None
    slopes: np.ndarray | None

    @property
    def real(self) -> np.ndarray:
        """bool [T]: tokens that are not padding."""
        return real_tokens(self.batch)


def ragged_batch(case: Case, rng: np.random.Generator) -> RaggedBatch:
    """The case's rows on shuffled pages; where pages lie before the window, they are given back."""
    assert all(kv - count >= case.common for count, kv in case.lengths if count)
    needed = [-(-kv // case.page_size) for _, kv in case.lengths]
    free = iter(rng.permutation(np.arange(1, case.num_pages)))
    rows = len(case.lengths) + case.padding
    counts = [count for count, _ in case.lengths] + [0] * case.padding
    start = np.arange(rows + 1) if case.decode else np.cumsum([0, *counts])
    table, kv_len = np.zeros((rows, max(needed) + 1), np.int32), np.zeros(rows, np.int32)
    kv_index = np.zeros(rows if case.decode else sum(counts) + case.padding, np.int32)
    common = [next(free) for _ in range(case.common // case.page_size)]
    for r, (count, kv) in enumerate(case.lengths):
        table[r, : needed[r]] = (common + [next(free) for _ in range(needed[r] - len(common))])[: needed[r]]
        kv_len[r] = kv
        positions = np.arange(kv - count, kv)
        page = table[r, positions // case.page_size]
        kv_index[start[r] : start[r] + count] = page * case.page_size + positions % case.page_size
        if case.window is not None:
            table[r, : max(0, kv - count - case.window + 1) // case.page_size] = 0
    return RaggedBatch(
        query_start=jnp.asarray(start, jnp.int32),
        kv_len=jnp.asarray(kv_len),
        page_table=jnp.asarray(table),
        kv_index=jnp.asarray(kv_index),
        first_page=jnp.int32(case.first_page),
        decode=case.decode,
    )


def without_unseen(data: Data) -> Data:
    """The same, but what no query sees is NaN: an earlier owner of the pages may have left anything there."""
    case, batch = data.case, data.batch
    table, seen = np.asarray(batch.first_page + batch.page_table), np.zeros(case.all_pages * case.page_size, bool)
    for row, (count, length) in enumerate(case.lengths):
        oldest = 0 if case.window is None else max(0, length - count - case.window + 1)
        position = np.arange(oldest, length)
        seen[table[row, position // case.page_size] * case.page_size + position % case.page_size] = True
    filling = data.filling.copy()
    filling[:, ~seen] = np.nan
    return replace(data, filling=filling)


def real_tokens(batch: RaggedBatch) -> np.ndarray:
    """bool [T]: tokens that are not padding."""
    if batch.decode:
        return np.asarray(batch.kv_len) > 0
    return np.arange(len(batch.kv_index)) < int(batch.query_start[-1])


def make_data(case: Case, seed: int = 0) -> Data:
    rng = np.random.default_rng(seed)
    batch = ragged_batch(case, rng)
    tokens = len(batch.kv_index)

    def normal(*shape: int, dtype: str = case.activations) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    return Data(
        case=case,
        q=normal(tokens, case.heads, case.head_dim),
        k=normal(tokens, case.kv_heads, case.head_dim),
        v=None if case.value_dim else normal(tokens, case.kv_heads, case.head_dim),
        filling=normal(2, case.all_pages * case.page_size, case.kv_heads, case.head_dim, dtype="float32"),
        batch=batch,
        rules={
            "scale": case.head_dim**-0.5,
            "window": case.window,
            "softcap": case.softcap,
            **({} if case.causal else {"causal": False}),
        },
        sinks=normal(case.heads, dtype="float32") if case.sinks else None,
        slopes=rng.uniform(0.01, 0.5, case.heads).astype(np.float32) if case.slopes else None,
    )


def empty_pages(case: Case, *, as_bits: bool = False, as_words: bool = False) -> KVPages:
    """Shapes and types of the case's pages."""
    return jax.eval_shape(
        lambda: make_pages(
            num_pages=case.all_pages,
            page_size=case.page_size,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=jnp.dtype(case.cache),
            as_bits=as_bits,
            as_words=as_words,
            calibration=None if case.calibration is None else np.asarray(case.calibration, np.float32),
            value_dim=case.value_dim,
        )
    )


def filled_pages(case: Case, filling: np.ndarray, *, as_bits: bool) -> KVPages:
    """Pages that hold something in every slot."""
    empty = empty_pages(case, as_bits=as_bits)
    calibration = None if case.calibration is None else jnp.asarray(case.calibration, jnp.float32)
    pages = replace(empty, data=np.zeros(empty.data.shape, empty.data.dtype), calibration=calibration)
    k, v = filling
    return reference.write_kv(pages, k, None if case.value_dim else v, np.arange(case.all_pages * case.page_size))


def owned(case: Case, data: Any) -> np.ndarray:
    """``data`` of pages but for the layer's dummy page, for which padding tokens race."""
    return np.delete(np.asarray(data), case.first_page, axis=0)
