"""Grids of the patches that a picture's rows are made of."""

from __future__ import annotations

import numpy as np

from llmjax.media.grids import bilinear, unpadded


def test_padding_is_cut_off_the_grid() -> None:
    grid = np.arange(48 * 48).reshape(48, 48)
    assert unpadded(grid, 100, 200).shape == (24, 48)
    assert unpadded(grid, 200, 100).shape == (48, 24)
    assert unpadded(grid, 100, 100).shape == (48, 48)


def test_shrinking_a_grid_mixes_four_cells() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    cells, shares = bilinear(np.arange(12).reshape(3, 4), 2, 2)
    found = (values.reshape(-1)[cells] * shares).sum(axis=-1)
    np.testing.assert_allclose(found, [[1.5, 3.5], [7.5, 9.5]])  # half a cell in from each edge: rows .25 and 1.75
