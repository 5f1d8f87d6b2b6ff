"""Sizes of resized pictures, and grids of tiles, beside what transformers' processors have."""

from __future__ import annotations

import pytest

from llmjax.errors import InvalidRequest
from llmjax.media.sizes import best_size, nearest_grid, rounded_up, scanned_grid, smart_size, split_size, tiled_size
from llmjax.models.vision.preparation import NearestGrid, PanAndScan, RoundedUp, SmartResize, Split

SMART = SmartResize(unit=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)


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
