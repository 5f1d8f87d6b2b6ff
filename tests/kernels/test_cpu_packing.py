"""Blocks packed in C++: the words that NumPy makes of them, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.packing import TYPES, pack_blocks, packs
from llmjax.weights.ggml.types import GGML_TYPES
from tests.weights.ggml.test_types import extreme_blocks, random_rows

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C++ kernels")
NAMES = {GGML_TYPES[number].name: number for number in sorted(TYPES)}
UNTOUCHED = 0xABABABAB


def both(name: str, raw: np.ndarray, *, tile: int) -> tuple[np.ndarray, bool, np.ndarray, bool]:
    """Words by C++, whether all scales are finite, and both by NumPy."""
    block = GGML_TYPES[NAMES[name]]
    form = block.row_format(raw.shape[1] // block.nbytes * block.elems)
    assert form is not None
    rows = block.quantized_rows(raw, form)
    tiles = -(-len(raw) // tile)
    records = np.zeros((tiles * tile, form.num_words), np.uint32)
    rows.write(records[: len(raw)])
    words = np.full((tiles, form.num_words, tile), UNTOUCHED, np.uint32)
    finite = pack_blocks(raw, words, type_id=NAMES[name], block_bytes=block.nbytes, form=form)
    return words, finite, records.reshape(tiles, tile, -1).swapaxes(1, 2), rows.finite


@pytest.mark.parametrize(("rows", "blocks", "tile"), [(75, 3, 32), (33, 1, 16), (16, 2, 16), (1, 5, 32)])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_words(name: str, rows: int, blocks: int, tile: int) -> None:
    words, finite, expected, expected_finite = both(name, random_rows(name, rows, (rows, blocks)), tile=tile)
    np.testing.assert_array_equal(words, expected)
    assert finite is expected_finite


@pytest.mark.parametrize("name", NAMES)
def test_extreme_blocks(name: str) -> None:
    words, finite, expected, expected_finite = both(name, extreme_blocks(name), tile=16)
    np.testing.assert_array_equal(words, expected)
    assert finite is expected_finite


@pytest.mark.parametrize("row", [0, 15, 16, 20])
def test_one_scale_that_is_not_finite_is_found(row: int) -> None:
    block = GGML_TYPES[NAMES["Q4_K"]]
    raw = random_rows("Q4_K", 0, (21, 2))
    fields = raw.reshape(-1, block.nbytes).view(block.layout)[:, 0]
    fields["d"], fields["dmin"] = 1, -1
    assert both("Q4_K", raw, tile=16)[1]
    fields["dmin"][2 * row + 1] = np.nan
    assert not both("Q4_K", raw, tile=16)[1]


def test_other_types_are_said_to_be_unknown() -> None:
    assert packs(NAMES["Q4_K"])
    for number, block in GGML_TYPES.items():
        if number not in TYPES and block.format is not None:
            assert not packs(number)
            words = np.zeros((1, block.format.num_words, 16), np.uint32)
            with pytest.raises(AssertionError, match=f"type {number} is not packed"):
                raw = np.zeros((16, block.nbytes), np.uint8)
                pack_blocks(raw, words, type_id=number, block_bytes=block.nbytes, form=block.format)
