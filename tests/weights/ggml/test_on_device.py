"""Blocks that a device takes apart, here a CPU: the words that NumPy packs, to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from llmjax.errors import CheckpointError
from llmjax.kernels.row_format import RowFormat
from llmjax.weights.ggml import on_device
from llmjax.weights.ggml.on_device import TYPES, Unpacker, is_taken_apart
from llmjax.weights.ggml.types import BlockType
from llmjax.weights.packing import RowStack, pack
from llmjax.weights.rows import QuantizedRows
from tests.weights.ggml.test_types import BY_NAME, random_rows

ROWS, TILE = 75, 32


@dataclass(frozen=True, eq=False)
class Rows:
    """A `RowSource` of rows in memory."""

    block: BlockType
    format: RowFormat
    raw: np.ndarray
    columns: None = None
    row_step: int = 1

    @property
    def size_out(self) -> int:
        return len(self.raw)

    def stored_rows(self, start: int, stop: int) -> np.ndarray:
        return self.raw[start:stop]

    def not_finite(self) -> CheckpointError:
        return CheckpointError("a.gguf: not finite")

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        return self.block.quantized_rows(self.raw[start:stop].copy(), self.format)


def source(name: str, *, seed: int = 0, blocks: int = 3) -> Rows:
    block = BY_NAME[name][1]
    form = block.row_format(blocks * block.elems)
    assert form is not None
    return Rows(block, form, random_rows(name, seed, (ROWS, blocks)))


def place() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize("name", sorted(TYPES))
def test_the_same_words(name: str) -> None:
    rows = source(name)
    assert is_taken_apart(rows)
    np.testing.assert_array_equal(Unpacker(tile=TILE).words(rows, place()), pack(rows, tile=TILE))


def test_a_large_matrix_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = source("Q4_K")
    monkeypatch.setattr(on_device, "BLOCK", TILE * rows.format.size_in)
    unpacker = Unpacker(tile=TILE)
    np.testing.assert_array_equal(unpacker.words(rows, place()), pack(rows, tile=TILE))


def test_a_stack() -> None:
    matrices = [source("Q6_K", seed=seed) for seed in range(3)]
    stack = RowStack(len(matrices), lambda index: matrices[index])
    assert is_taken_apart(stack)
    np.testing.assert_array_equal(Unpacker(tile=TILE).words(stack, place()), pack(stack, tile=TILE))


def test_other_types_are_left_to_the_host() -> None:
    assert not is_taken_apart(source("IQ2_XS"))
    assert not is_taken_apart(np.zeros(3))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("field", ["d", "dmin"])
def test_scales_that_are_not_finite_are_refused(field: str, value: float) -> None:
    rows, unpacker = source("Q4_K"), Unpacker(tile=TILE)
    blocks = rows.raw.reshape(-1, rows.block.nbytes).view(rows.block.layout)[:, 0]
    blocks["d"], blocks["dmin"] = 1, 1
    unpacker.words(rows, place())
    unpacker.check()
    blocks[field][-1] = value
    unpacker.words(rows, place())
    with pytest.raises(CheckpointError, match=r"a\.gguf: not finite"):
        unpacker.check()
