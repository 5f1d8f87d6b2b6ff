"""Layouts of pictures: shapes of their tiles, numbers of rows, and bounds. Golden tests have the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from llmjax.errors import InvalidRequest
from llmjax.media.layouts import cut, laid_out
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


def test_tiles_are_cut_line_by_line() -> None:
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6)).convert("RGB")
    assert [tile.getpixel((0, 0))[0] for tile in cut(image, 2)] == [0, 2, 4, 12, 14, 16]  # type: ignore[index]
