"""Sizes and tiles at the edges: the smallest, the longest, exact halves and multiples. Golden tests have the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from llmjax.errors import InvalidRequest
from llmjax.media.layouts import (
    best_size,
    bilinear,
    cut,
    laid_out,
    nearest_grid,
    rounded_up,
    scanned_grid,
    smart_size,
    split_size,
    tiled_size,
    unpadded,
)
from llmjax.models.vision.preparation import (
    Budgeted,
    Cropped,
    Layout,
    NearestGrid,
    Padded,
    PaddedViews,
    PanAndScan,
    Pinpoints,
    Preparation,
    RoundedUp,
    SmartResize,
    Split,
    Squared,
    Stretched,
)

SMART = SmartResize(unit=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
LAYOUTS: dict[str, Layout] = {
    "smart": SmartResize(unit=12, min_pixels=576, max_pixels=7000),
    "stretched": Stretched(height=24, width=36),
    "rounded": RoundedUp(unit=12, longest=60),
    "cropped": Cropped(shortest=24, crop=24),
    "split": Split(longest=72, tile=24),
    "whole": Split(longest=72, tile=24, tiled=False),
    "grid": NearestGrid(tile=24, least=1, most=6),
    "pinpoints": Pinpoints(sizes=((24, 48), (48, 24), (48, 48)), tile=24),
    "scaled": NearestGrid(tile=24, least=1, most=6, by_scale=True),
    "padded": Padded(unit=12, patch=6, most=50, longest=40, shrunk=True),
    "squared": Squared(side=24, least=6, color=(9, 9, 9)),
    "views": PaddedViews(sizes=((24, 24), (24, 48), (48, 48)), tile=24, color=(9, 9, 9)),
    "scanned": PanAndScan(tile=24, least=12, most=4, ratio=1.2),
    "mixed": Pinpoints(sizes=((24, 48), (96, 24), (72, 72)), tile=24, most=2, padding=(9, 9, 9)),
}


def preparation(layout: Layout, *, side: int = 2) -> Preparation:
    return Preparation(layout=layout, patch=6, side=side, resample=3, placeholder="", row_token=0)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (28, 28, (56, 56)),  # below the least
        (1, 1, (56, 56)),
        (70, 42, (56, 56)),  # exact halves go to the even multiple
        (98, 126, (112, 112)),
        (4000, 3000, (1148, 840)),
        (3, 600, (28, 812)),  # the side of 3 is lifted from 0
    ],
)
def test_smart_sizes(height: int, width: int, expected: tuple[int, int]) -> None:
    assert smart_size(height, width, SMART) == expected


def test_sides_that_differ_too_much_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="201 x 1 pixels; one side may be 200 times the other"):
        smart_size(1, 201, SMART)
    with pytest.raises(InvalidRequest, match="differ too much"):
        rounded_up(1, 200, RoundedUp(unit=12, longest=60))


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (replace(SMART, min_pixels=10**8, max_pixels=10**9), "10024 x 10024"),
        (Budgeted(unit=12, rows=10**6), "12000 x 12000"),
        (Cropped(shortest=10**6, crop=84), "1000000 x 1000000"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pictures_that_would_become_too_large_are_refused(layout: Layout, size: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the image becomes {size} pixels, more than"):
        laid_out(Image.new("RGB", (30, 30)), preparation(layout))


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    name=st.sampled_from(sorted(LAYOUTS)),
    several=st.booleans(),
)
def test_tiles_have_whole_squares_and_as_many_rows_as_they_say(
    height: int, width: int, name: str, several: bool
) -> None:
    layout = LAYOUTS[name]
    made = preparation(layout, side=1 if isinstance(layout, Pinpoints) else 2)
    try:
        laid = laid_out(Image.new("RGB", (width, height), (1, 2, 3)), made, several=several)
    except InvalidRequest:
        assert max(height, width) > 30 * min(height, width)
        return
    unit = made.patch * made.side
    assert len({tile.size for tile in laid.tiles}) == 1
    tile_width, tile_height = laid.tiles[0].size
    assert tile_width % unit == tile_height % unit == 0 < min(tile_width, tile_height)
    merged = len(laid.tiles) * (tile_width // unit) * (tile_height // unit)
    if laid.sources is None:
        assert laid.arrangement.num_rows == merged
    else:
        assert laid.shares is not None and laid.sources.shape == laid.shares.shape
        assert laid.arrangement.num_rows == len(laid.sources)
        assert laid.sources.min() >= -2 and laid.sources.max() < merged
        np.testing.assert_allclose(laid.shares.sum(axis=1), 1, atol=1e-6)


def test_sizes_before_and_after_tiles() -> None:
    layout = Split(longest=1456, tile=364)
    assert split_size(100, 300, layout) == (486, 1456)  # an odd side becomes even
    assert tiled_size(486, 1456, 364) == (728, 1456)
    assert tiled_size(365, 364, 364) == (728, 728)


def test_of_equally_near_grids_the_later_is_taken_for_large_pictures() -> None:
    layout = NearestGrid(tile=448, least=1, most=12)
    assert nearest_grid(400, 400, layout) == (1, 1)
    assert nearest_grid(900, 900, layout) == (2, 2)
    assert nearest_grid(2000, 2000, layout) == (3, 3)
    assert nearest_grid(448, 1000, layout) == (1, 2)


def test_the_best_size_wastes_least() -> None:
    sizes = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    assert best_size(300, 640, sizes) == (336, 672)
    assert best_size(1000, 300, sizes) == (1008, 336)
    assert best_size(10, 10, sizes) == (336, 672)  # all keep it whole; the first wastes least


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


def test_tiles_are_cut_line_by_line() -> None:
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6)).convert("RGB")
    assert [tile.getpixel((0, 0))[0] for tile in cut(image, 2)] == [0, 2, 4, 12, 14, 16]  # type: ignore[index]


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [
        (100, 100, (0, 0)),
        (1000, 1190, (0, 0)),  # less than 1.2 times as wide
        (1000, 1200, (1, 2)),
        (600, 1500, (1, 3)),  # 2.5 is rounded up
        (600, 1499, (1, 2)),
        (300, 3000, (1, 4)),  # the most
        (1500, 600, (3, 1)),
        (255, 1000, (0, 0)),  # a side of less than 256
        (256, 511, (1, 2)),
        (256, 510, (0, 0)),  # parts of 255
    ],
)
def test_long_pictures_of_gemma_3_have_parts(height: int, width: int, grid: tuple[int, int]) -> None:
    assert scanned_grid(height, width, PanAndScan(tile=896, least=256, most=4, ratio=1.2)) == grid
