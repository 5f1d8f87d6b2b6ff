"""Blocks of ggml's types become the words of a `QTensor` on the device that multiplies them.

A device is sent a matrix as it lies in the file, and takes it apart in one pass over its own memory. NumPy on the host
does the same for types that are not traced, on one core: what it does holds the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.errors import CheckpointError
from llmjax.kernels.row_format import CHUNK, PLANES, RowFormat
from llmjax.weights.ggml.types import BlockType
from llmjax.weights.packing import RowSource, RowStack
from llmjax.weights.rows import NUMBER_DTYPES

TYPES = frozenset(
    {
        *("Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "TQ2_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    }
)
"""Names of the types whose `BlockType.unpack` can be traced."""

BLOCK = 1 << 26  # weights taken apart at a time


@runtime_checkable
class StoredBlocks(RowSource, Protocol):
    """A quantized matrix whose rows can be had as they are stored."""

    @property
    def block(self) -> BlockType:
        """The stored type."""

    def stored_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop`, uint8 [n, bytes of a row]."""

    def not_finite(self) -> CheckpointError:
        """What is raised if a scale is infinite or not a number."""


class Unpacker:
    """Takes matrices apart on devices.

    Args:
        tile: rows whose words are interleaved.
    """

    def __init__(self, *, tile: int) -> None:
        self._tile = tile
        self._finite: list[tuple[StoredBlocks, jax.Array]] = []  # what the devices have yet to say

    def words(self, source: StoredBlocks | RowStack, place: jax.sharding.Sharding) -> jax.Array:
        """The words of a matrix or a stack that `is_taken_apart`, as ``llmjax.weights.packing.pack`` makes them.

        Args:
            place: one device.
        """
        if isinstance(source, RowStack):
            matrices = map(source.matrix, range(source.count))
            return jnp.stack([self.words(matrix, place) for matrix in matrices if isinstance(matrix, StoredBlocks)])
        step = max(1, BLOCK // (self._tile * source.format.size_in)) * self._tile
        parts = []
        for start in range(0, source.size_out, step):
            raw = jax.device_put(source.stored_rows(start, min(start + step, source.size_out)), place)
            words, finite = packed(raw, block=source.block, form=source.format, tile=self._tile)
            parts.append(words)
            self._finite.append((source, finite))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def check(self) -> None:
        """Waits for the devices.

        Raises:
            CheckpointError: a scale or minimum is infinite or not a number.
        """
        for source, finite in self._finite:
            if not finite:
                raise source.not_finite()
        self._finite.clear()


def is_taken_apart(source: Any) -> TypeGuard[StoredBlocks | RowStack]:
    """Whether a matrix or a stack can be sent to a device as it is stored."""
    one = source.first if isinstance(source, RowStack) else source
    return isinstance(one, StoredBlocks) and one.block.name in TYPES


@partial(jax.jit, static_argnames=("block", "form", "tile"))
def packed(raw: jax.Array, *, block: BlockType, form: RowFormat, tile: int) -> tuple[jax.Array, jax.Array]:
    """Words of rows, and whether all scales are finite.

    Args:
        raw: u8 [rows, bytes of a row].
        block: a type of `TYPES`.
        form: of each row.
        tile: rows whose words are interleaved; the last tile is filled up with zeros.

    Returns:
        u32 [tiles, words of a record, tile] and bool [].
    """
    rows, unpack = len(raw), cast(Callable[[Any], dict[str, Any]], block.unpack)
    fields: dict[str, jax.Array] = unpack(_fields(raw.reshape(-1, block.nbytes), block))
    fields = {name: values.reshape(rows, -1) for name, values in fields.items()}
    numbers = {name: fields[name] for name in form.fields}
    records = [_code_words(_bytes(fields["codes"]), form)]
    for name, entry in form.fields.items():
        stored = _bytes(numbers[name].astype(NUMBER_DTYPES[entry.number]))
        records.append(_as_words(jnp.pad(stored, ((0, 0), (0, 4 * entry.num_words - stored.shape[1])))))
    words = jnp.pad(jnp.concatenate(records, 1), ((0, -rows % tile), (0, 0)))
    finite = [jnp.isfinite(values.astype(jnp.float32)).all() for values in numbers.values()]
    return jnp.swapaxes(words.reshape(-1, tile, words.shape[1]), 1, 2), jnp.stack(finite).all()


def _fields(blocks: jax.Array, block: BlockType) -> dict[str, jax.Array]:
    """Fields of blocks u8 [n, bytes], by name, as NumPy has them of a structured array."""
    assert block.layout is not None and block.layout.fields is not None
    found = {}
    for name, (kind, start, *_) in block.layout.fields.items():
        number = kind.base
        stored = blocks[:, start : start + kind.itemsize].reshape(len(blocks), *kind.shape, number.itemsize)
        found[name] = jax.lax.bitcast_convert_type(stored[..., 0] if number.itemsize == 1 else stored, number)
    return found


def _code_words(codes: jax.Array, form: RowFormat) -> jax.Array:
    """u32 [n, words] of codes u8 [n, in], as ``llmjax.kernels.row_format`` has them."""
    codes = jnp.pad(codes, ((0, 0), (0, form.num_chunks * CHUNK - codes.shape[1])))
    planes, low = [], 0
    for width in PLANES[form.codes.bits]:
        pieces = codes.reshape(len(codes), form.num_chunks, 8 // width, width, 4) >> np.uint8(low)
        pieces = (pieces & np.uint8((1 << width) - 1)) << np.arange(0, 8, width, dtype=np.uint8)[:, None, None]
        planes.append(_as_words(pieces.sum(2, dtype=jnp.uint8).reshape(len(codes), form.num_chunks, -1)))
        low += width
    return jnp.concatenate(planes, 2).reshape(len(codes), -1)


def _bytes(numbers: jax.Array) -> jax.Array:
    """u8 [n, size * bytes of each] of numbers [n, size]."""
    return jax.lax.bitcast_convert_type(numbers, jnp.uint8).reshape(len(numbers), -1)


def _as_words(stored: jax.Array) -> jax.Array:
    """u32 [..., n] of u8 [..., 4 * n]."""
    return jax.lax.bitcast_convert_type(stored.reshape(*stored.shape[:-1], -1, 4), jnp.uint32)
