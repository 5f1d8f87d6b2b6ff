"""Sizes that pictures are resized to, and grids of tiles, as transformers' processors have them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llmjax.errors import InvalidRequest
from llmjax.models.vision.preparation import (
    Budgeted,
    Canvas,
    Covering,
    FilledGrid,
    NearestGrid,
    Overlapped,
    Padded,
    PanAndScan,
    Quartered,
    RoundedUp,
    ShownTiles,
    Slices,
    SmartResize,
    Split,
    Windowed,
)

MAX_ASPECT = 200
MOST_PIXELS = 4096  # along the longer side of what is split
LEAST_SHOWN = 10  # pixels along a side of a picture on white
COVERED = 0.9  # of a picture's area is shown by a grid of tiles that is large enough
PAIR = 2  # frames of a patch, to a multiple of which a video's are rounded where their pixels are counted


def smart_size(height: int, width: int, layout: SmartResize) -> tuple[int, int]:
    """Height and width after resizing; formula: transformers' ``smart_resize``.

    Raises:
        InvalidRequest: one side is more than 200 times the other.
    """
    unit, frames = layout.unit, layout.frames
    if layout.grows and min(height, width) < unit:
        grown = max(unit / height, unit / width)
        height, width = int(height * grown), int(width * grown)
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise InvalidRequest(f"the image is {width} x {height} pixels; one side may be {MAX_ASPECT} times the other")
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    counted = frames if frames < PAIR else round(frames / PAIR) * PAIR
    if counted * high * wide > layout.max_pixels:
        shrunk = math.sqrt((frames * height * width) / layout.max_pixels)
        return (
            max(unit, math.floor(height / shrunk / unit) * unit),
            max(unit, math.floor(width / shrunk / unit) * unit),
        )
    if counted * high * wide < layout.min_pixels:
        grown = math.sqrt(layout.min_pixels / (frames * height * width))
        return math.ceil(height * grown / unit) * unit, math.ceil(width * grown / unit) * unit
    return high, wide


def budgeted_size(height: int, width: int, layout: Budgeted) -> tuple[int, int]:
    """Height and width after resizing; formula: transformers' ``get_aspect_ratio_preserving_size`` of Gemma 4."""
    unit, rows = layout.unit, layout.rows
    factor = math.sqrt(rows * unit**2 / (height * width))
    high, wide = (math.floor(factor * side / unit) for side in (height, width))
    if not high and not wide:
        raise InvalidRequest(f"the image is {width} x {height} pixels, which leave nothing of {rows} rows")
    if not high:
        high, wide = 1, min(width // height, rows)
    elif not wide:
        high, wide = min(height // width, rows), 1
    return high * unit, wide * unit


def rounded_up(height: int, width: int, layout: RoundedUp) -> tuple[int, int]:
    """Height and width after resizing; formula: transformers' ``get_resize_output_image_size`` of Pixtral."""
    ratio = max(height / layout.longest, width / layout.longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    unit = layout.unit
    high, wide = ((side - 1) // unit + 1 for side in (height, width))
    if not high or not wide:
        raise InvalidRequest(f"the image is {width} x {height} pixels; its sides differ too much")
    return high * unit, wide * unit


def unpadded_size(height: int, width: int, layout: Padded) -> tuple[int, int]:
    """Height and width before padding; formula: transformers' ``navit_resize`` of Kimi K2.5, and Kimi-VL's ``rescale``.

    Raises:
        InvalidRequest: a side is too long, where pictures are not made smaller for that.
    """
    patch, along = layout.patch, layout.longest * layout.patch
    count = max(1, height // patch) * max(1, width // patch)
    if layout.shrunk:
        scale = min(1.0, math.sqrt(layout.most / count), along / height, along / width)
        return tuple(min(max(1, int(side * scale)), along) for side in (height, width))  # type: ignore[return-value]
    if (height // patch) * (width // patch) > layout.most:
        scale = math.sqrt(layout.most / count)
        height, width = int(height * scale), int(width * scale)
    if not height or not width or max(-(-side // layout.unit) * layout.unit for side in (height, width)) > along:
        raise InvalidRequest(f"the image is {width} x {height} pixels when it is laid out; a side may have {along}")
    return height, width


def split_size(height: int, width: int, layout: Split) -> tuple[int, int]:
    """Height and width after the first resizing; formula: transformers' Idefics3 processor."""
    aspect, longest = width / height, layout.longest
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        width, height = int(longest * aspect), longest
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > MOST_PIXELS:
        width, height = MOST_PIXELS, int(MOST_PIXELS / aspect)
    elif height > width and height > MOST_PIXELS:
        width, height = int(MOST_PIXELS * aspect), MOST_PIXELS
    return max(height, 1), max(width, 1)


def tiled_size(height: int, width: int, tile: int) -> tuple[int, int]:
    """Multiples of a tile's side that are not less than a height and width, or than what keeps their aspect."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / aspect) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * aspect) / tile) * tile


def nearest_grid(height: int, width: int, layout: NearestGrid) -> tuple[int, int]:
    """Rows and columns of the grid; formula: transformers' ``get_optimal_tiled_canvas``, of which there are two."""
    numbers = range(1, layout.most + 1)
    grids = [
        (columns, rows) for columns in numbers for rows in numbers if layout.least <= columns * rows <= layout.most
    ]
    if layout.by_scale:
        by_size = sorted(grids, key=lambda grid: grid[0] * grid[1])
        scales = [min(columns * layout.tile / width, rows * layout.tile / height) for columns, rows in by_size]
        larger = [scale for scale in scales if scale >= 1]
        columns, rows = by_size[scales.index(min(larger) if larger else max(scales))]
        return rows, columns
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        large = width * height > 0.5 * layout.tile * layout.tile * columns * rows
        if distance < nearest or (distance == nearest and large):
            best, nearest = (rows, columns), distance
    return best


def best_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The size that keeps most of a picture and wastes least; formula: transformers' ``select_best_resolution``."""
    best, kept, wasted = sizes[0], 0, math.inf
    for high, wide in sizes:
        scale = min(wide / width, high / height)
        useful = min(int(width * scale) * int(height * scale), width * height)
        waste = high * wide - useful
        if useful > kept or (useful == kept and waste < wasted):
            best, kept, wasted = (high, wide), useful, waste
    return best


def fitted_size(height: int, width: int, target: tuple[int, int]) -> tuple[int, int]:
    """The size inside another that keeps the aspect; formula: transformers' ``get_patch_output_size``."""
    of_width, of_height = target[1] / width, target[0] / height
    if of_width < of_height:
        return min(math.ceil(height * of_width), target[0]), target[1]
    return target[0], min(math.ceil(width * of_height), target[1])


def slices_grid(height: int, width: int, layout: Slices) -> tuple[int, int] | None:
    """Rows and columns of slices; None: the picture is not cut. Formula: MiniCPM-V's ``get_sliced_grid``."""
    wanted = min(math.ceil(width * height / layout.side**2), layout.most)
    if wanted <= 1:
        return None
    best, nearest = (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        for columns in range(1, count + 1) if 1 < count <= layout.most else ():
            distance = abs(math.log(width / height) - math.log(columns / (count // columns)))
            if count % columns == 0 and distance < nearest:
                best, nearest = (count // columns, columns), distance
    return best


def slice_size(height: float, width: float, layout: Slices, unit: int, *, grown: bool) -> tuple[int, int]:
    """Height and width of a slice, or of the whole picture; formula: MiniCPM-V's ``find_best_resize``.

    Args:
        grown: whether it becomes larger where it is small.
    """
    if width * height > layout.side**2 or grown:
        aspect = width / height
        height = int(layout.side / math.sqrt(aspect))
        width = int(height * aspect)
    return nearest_multiple(height, unit), nearest_multiple(width, unit)


def nearest_multiple(value: float, unit: int) -> int:
    return max(round(value / unit) * unit, unit)


def filled_size(height: int, width: int, layout: FilledGrid) -> tuple[int, int]:
    """Height and width of a wide picture before it is padded; formula: Phi-3.5-vision's ``HD_transform``."""
    ratio, scale = width / height, 1
    while scale * math.ceil(scale / ratio) <= layout.most:
        scale += 1
    scale -= 1
    return int(scale * layout.tile / ratio), scale * layout.tile


def shown_size(height: int, width: int, layout: ShownTiles) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of tiles, and height and width of the picture on them; formula: transformers'
    ``dynamic_preprocess`` of Phi-4-multimodal.

    Raises:
        InvalidRequest: a side of it has less than ten pixels.
    """
    tile = layout.tile
    rows, columns = math.ceil(height / tile), math.ceil(width / tile)
    if rows * columns > layout.most:
        rows, columns = nearest_grid(height, width, NearestGrid(tile=tile, least=1, most=layout.most))
    down, across = rows * tile / height, columns * tile / width
    high, wide = (int(height * across), columns * tile) if across < down else (rows * tile, int(width * down))
    if min(high, wide) < LEAST_SHOWN:
        raise InvalidRequest(f"the image is {width} x {height} pixels; its sides differ too much")
    return (rows, columns), (high, wide)


def scanned_grid(height: int, width: int, layout: PanAndScan) -> tuple[int, int]:
    """Rows and columns of parts, (0, 0) if there are none; formula: transformers' ``pan_and_scan`` of Gemma 3."""
    long, short = max(height, width), min(height, width)
    count = min(layout.most, max(2, min(long // layout.least, math.floor(long / short + 0.5))))
    if long / short < layout.ratio or min(math.ceil(long / count), short) < layout.least:
        return 0, 0
    return (1, count) if width >= height else (count, 1)


def covering_grid(height: int, width: int, layout: Covering) -> tuple[int, int]:
    """Rows and columns of the grid; formula: transformers' ``get_min_tile_covering_grid``, where a height is
    divided by what become columns."""
    side, grids = layout.tile, []
    numbers = range(1, layout.most + 1)
    sizes = [(columns, rows) for columns in numbers for rows in numbers if columns * rows <= layout.most]
    for columns, rows in sorted(sizes, key=lambda grid: grid[0] * grid[1]):
        shown = 0.0
        high, wide = height // columns, width // rows
        for line in range(columns):
            for place in range(rows):
                part_high = height - line * high if line == columns - 1 else high
                part_wide = width - place * wide if place == rows - 1 else wide
                long, short = max(part_wide, part_high), min(part_wide, part_high)
                shown += side * (short / long * side) if long > side else long * short
        grids.append((columns * rows, shown / (height * width), (rows, columns)))
    enough = [grid for grid in grids if grid[1] > COVERED]
    if enough:
        return min(enough, key=lambda grid: (grid[0], -grid[1]))[2]
    return min(grids, key=lambda grid: (-grid[1], grid[0]))[2]


def quartered_size(height: int, width: int, layout: Quartered) -> tuple[int, int]:
    """Height and width of a view; formula: transformers' ``get_resize_output_image_size`` of Idefics2."""
    aspect = width / height
    if width >= height and width > layout.longest:
        height, width = int(layout.longest / aspect), layout.longest
    elif height > width and height > layout.longest:
        height, width = layout.longest, int(layout.longest * aspect)
    return max(height, layout.shortest), max(width, layout.shortest)


def overlapped_grid(height: int, width: int, layout: Overlapped) -> tuple[int, int]:
    """Rows and columns of tiles; formula: Moondream's ``select_tiling``."""
    edge = 2 * layout.margin
    window, high, wide = layout.tile - edge, height - edge, width - edge
    if high <= window or wide <= window:
        return 1, 1
    least = -(-high // window), -(-wide // window)
    if least[0] * least[1] > layout.most:
        shrunk = math.sqrt(layout.most / (least[0] * least[1]))
        return max(1, math.floor(least[0] * shrunk)), max(1, math.floor(least[1] * shrunk))
    rows = max(math.floor(math.sqrt(layout.most * high / wide)), least[0])
    columns = max(math.floor(math.sqrt(layout.most * wide / high)), least[1])
    if rows * columns > layout.most:
        if columns > rows:
            columns = layout.most // rows
        else:
            rows = layout.most // columns
    return max(1, rows), max(1, columns)


def windowed_grid(height: int, width: int, layout: Windowed) -> tuple[int, int]:
    """Rows and columns of tiles; formula, in f32: transformers' ``select_tiling`` of Molmo 2."""
    edge, numbers = layout.before + layout.after, range(1, layout.most + 1)
    grids = [(rows, columns) for rows in numbers for columns in numbers if rows * columns <= layout.most]
    grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
    inner = np.array([height - edge, width - edge], np.float32)
    with np.errstate(divide="ignore"):
        scales = (np.array(grids, np.float32) * np.float32(layout.tile - edge) / inner).min(axis=1)
    if (scales < 1).all():
        return grids[int(scales.argmax())]
    return grids[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]


def canvases(most: int) -> list[tuple[int, int]]:
    """Rows and columns of every grid of up to ``most`` tiles, those of equal aspect together, larger ones first."""
    by_aspect: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_aspect.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [grid for grids in by_aspect.values() for grid in grids]


def best_canvas(height: int, width: int, layout: Canvas) -> tuple[int, int]:
    """Rows and columns of the grid; formula, in f32: transformers' ``get_best_fit`` of Llama 4."""
    grids = canvases(layout.most)
    sides = np.array(grids, np.float32) * np.float32(layout.tile)
    scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
    larger = scales[scales >= 1]
    scale = larger.min() if len(larger) else scales.max()
    return min((grid for grid, own in zip(grids, scales, strict=True) if own == scale), key=math.prod)


def undistorted(height: int, width: int, layout: Canvas, grid: tuple[int, int]) -> tuple[int, int]:
    """Height and width on the canvas; formula: transformers' ``get_max_res_without_distortion``."""
    full = [count * layout.tile for count in grid]
    wished = [max(side, layout.tile) for side in (height, width)]
    high, wide = (min(side, most) for side, most in zip(wished, full, strict=True))
    # A quotient is one of f32 where the canvas is what limits it.
    of_height, of_width = (
        float(np.float32(limit) / np.float32(side)) if limit < wish else limit / side
        for limit, wish, side in zip((high, wide), wished, (height, width), strict=True)
    )
    if of_width < of_height:
        scale = np.float32(of_width) if wide < wished[1] else of_width
        return max(min(math.floor(height * scale), high), 1), wide
    scale = np.float32(of_height) if high < wished[0] else of_height
    return high, max(min(math.floor(width * scale), wide), 1)
