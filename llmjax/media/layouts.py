"""Lays a picture out: resizes it, and cuts it into tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from llmjax.errors import InvalidRequest
from llmjax.media.grids import bilinear, in_tiles, tiled_grid, unpadded, windows_of
from llmjax.media.sizes import (
    MAX_ASPECT,
    best_canvas,
    best_size,
    budgeted_size,
    covering_grid,
    filled_size,
    fitted_size,
    nearest_grid,
    nearest_multiple,
    overlapped_grid,
    quartered_size,
    rounded_up,
    scanned_grid,
    shown_size,
    slice_size,
    slices_grid,
    smart_size,
    split_size,
    tiled_size,
    undistorted,
    unpadded_size,
    windowed_grid,
)
from llmjax.models.vision.preparation import (
    Arrangement,
    Budgeted,
    Canvas,
    Columned,
    Covering,
    Cropped,
    Fenced,
    FilledGrid,
    Gridded,
    NearestGrid,
    Overlapped,
    Padded,
    PaddedViews,
    PanAndScan,
    Pinpoints,
    Pooled,
    Preparation,
    Quartered,
    RoundedUp,
    ShownTiles,
    Slices,
    SmartResize,
    Split,
    Squared,
    Stretched,
    Windowed,
    least_patches,
    most_patches,
    pooled,
)

MOST_RESIZED = 50_000_000  # pixels of a resized picture, which keywords may enlarge
SHRUNK_FROM = 1.1  # times the side that rows may have
CORNERS = 4


@dataclass(frozen=True, eq=False)
class Interpolated:
    """A tile whose values are a picture's, interpolated after they have been normalized.

    Attributes:
        size: width and height of the tile.
    """

    image: Image.Image
    size: tuple[int, int]


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A picture as tiles, one if it is not cut.

    Attributes:
        tiles: in RGB; those of one size stand one after another.
        arrangement: what the picture's text depends on.
        sources, shares, unseen: see ``PreparedImage``.
    """

    tiles: Sequence[Image.Image | Interpolated]
    arrangement: Arrangement
    sources: NDArray[np.int32] | None = None
    shares: NDArray[np.float32] | None = None
    unseen: NDArray[np.int32] | None = None


def laid_out(image: Image.Image, preparation: Preparation, *, several: bool = False) -> LaidOut:
    """A picture in RGB as its encoder's family lays it out.

    Args:
        several: whether the prompt has more pictures than ``preparation.alone``.

    Raises:
        InvalidRequest: its sides differ too much, or it becomes too large.
    """
    layout = preparation.layout
    match layout:
        case SmartResize():
            return _whole(image, smart_size(image.height, image.width, layout), preparation)
        case Budgeted():
            return _whole(image, budgeted_size(image.height, image.width, layout), preparation)
        case RoundedUp():
            return _whole(image, rounded_up(image.height, image.width, layout), preparation)
        case Padded():
            return _padded(image, layout, preparation)
        case Stretched(height=height, width=width):
            return _whole(image, (height, width), preparation)
        case Cropped():
            return _cropped(image, layout, preparation)
        case Pooled():
            return _pooled(image, layout, preparation)
        case Split():
            return _split(image, layout, preparation)
        case Squared():
            return _squared(image, layout, preparation)
        case PanAndScan():
            return _scanned(image, layout, preparation)
        case PaddedViews():
            return _views(image, layout, preparation, several=several)
        case Covering():
            return _covered(image, layout, preparation)
        case Quartered():
            return _quartered(image, layout, preparation)
        case Overlapped():
            return _overlapped(image, layout, preparation)
        case Windowed():
            return _windowed(image, layout, preparation)
        case NearestGrid():
            return _on_grid(image, layout, preparation)
        case Canvas():
            return _on_canvas(image, layout, preparation)
        case FilledGrid():
            return _filled(image, layout, preparation)
        case ShownTiles():
            return _shown(image, layout, preparation)
        case Slices():
            return _sliced(image, layout, preparation)
        case Pinpoints():
            return _fitted(image, layout, preparation, several=several)


def _padded(image: Image.Image, layout: Padded, preparation: Preparation) -> LaidOut:
    size, unit = unpadded_size(image.height, image.width, layout), layout.unit
    height, width = (-(-side // unit) * unit for side in size)
    canvas = Image.new("RGB", (width, height))
    canvas.paste(resized(image, size, preparation) if size != (image.height, image.width) else image, (0, 0))
    return _one(canvas, preparation)


def _sliced(image: Image.Image, layout: Slices, preparation: Preparation) -> LaidOut:
    patch, grid = preparation.patch, slices_grid(image.height, image.width, layout)
    size = slice_size(image.height, image.width, layout, patch, grown=grid is None)
    sizes, tiles = [size], [resized(image, size, preparation)]
    if grid is not None:
        sides = zip((image.height, image.width), grid, strict=True)
        along, across = (nearest_multiple(side, count) / count for side, count in sides)
        sizes.append(slice_size(along, across, layout, patch, grown=True))
        refined = resized(image, (sizes[1][0] * grid[0], sizes[1][1] * grid[1]), preparation)
        tiles += cut(refined, sizes[1])
    fewest, most = (limit(layout.side // patch) for limit in (least_patches, most_patches))
    if any(not fewest <= high * wide // patch**2 <= most for high, wide in sizes):
        raise InvalidRequest(f"the image is {image.width} x {image.height} pixels; its sides differ too much")
    rows, columns = grid or (0, 0)
    return LaidOut(tiles, Arrangement(rows, columns, 1, layout.rows, layout.rows * len(tiles)))


def _filled(image: Image.Image, layout: FilledGrid, preparation: Preparation) -> LaidOut:
    tile, tall = layout.tile, image.width < image.height
    turned = image.transpose(Image.Transpose.TRANSPOSE) if tall else image
    high, wide = filled_size(turned.height, turned.width, layout)
    if not high or not wide:
        raise InvalidRequest(f"the image is {image.width} x {image.height} pixels; its sides differ too much")
    canvas = Image.new("RGB", (wide, math.ceil(high / tile) * tile), (255, 255, 255))
    canvas.paste(resized(turned, (high, wide), preparation), (0, (canvas.height - high) // 2))
    canvas = canvas.transpose(Image.Transpose.TRANSPOSE) if tall else canvas
    along = tile // preparation.patch // preparation.side
    grid = tiled_grid(canvas.height // tile, canvas.width // tile, along)
    whole = np.arange(along**2).reshape(along, along)
    lines = [np.pad(part, ((0, 0), (0, 1)), constant_values=-1).reshape(-1, 1) for part in (grid, whole)]
    tiles: list[Image.Image | Interpolated] = [Interpolated(canvas, (tile, tile)), *cut(canvas, tile)]
    return _summed(tiles, np.concatenate([lines[0], [[-2]], lines[1]]), None)


def _shown(image: Image.Image, layout: ShownTiles, preparation: Preparation) -> LaidOut:
    tile, patch, side = layout.tile, preparation.patch, preparation.side
    (rows, columns), size = shown_size(image.height, image.width, layout)
    canvas = Image.new("RGB", (columns * tile, rows * tile), (255, 255, 255))
    canvas.paste(resized(image, size, preparation), (0, 0))
    # Patches along each axis that are not white alone.
    shown = [
        (whole - (whole - own) // patch * patch) // patch for whole, own in zip(canvas.size[::-1], size, strict=True)
    ]
    along = tile // patch
    white = (np.arange(rows * along)[:, None] >= shown[0]) | (np.arange(columns * along) >= shown[1])
    white = white.reshape(rows, along // side, side, columns, along // side, side).transpose(0, 3, 1, 4, 2, 5)
    unseen = np.concatenate([np.zeros((1, along**2), bool), white.reshape(rows * columns, along**2)])
    unseen &= ~unseen.all(axis=1, keepdims=True)  # nothing of such a tile is used
    grid = tiled_grid(rows, columns, along // side)[: -(-shown[0] // side), : -(-shown[1] // side)]
    whole = np.arange((along // side) ** 2).reshape(along // side, along // side)
    lines = [np.pad(part, ((0, 0), (0, 1)), constant_values=-1).reshape(-1, 1) for part in (grid, whole)]
    tiles: list[Image.Image | Interpolated] = [Interpolated(canvas, (tile, tile)), *cut(canvas, tile)]
    laid = _summed(tiles, np.concatenate([lines[0], [[-2]], lines[1]]), None)
    return replace(laid, unseen=np.flatnonzero(unseen).astype(np.int32))


def _scanned(image: Image.Image, layout: PanAndScan, preparation: Preparation) -> LaidOut:
    rows, columns = scanned_grid(image.height, image.width, layout)
    parts = [image]
    if rows:
        parts += cut(image, (math.ceil(image.height / rows), math.ceil(image.width / columns)))
    return _many([resized(part, (layout.tile, layout.tile), preparation) for part in parts], rows, columns, preparation)


def _squared(image: Image.Image, layout: Squared, preparation: Preparation) -> LaidOut:
    scale = layout.side / max(image.size)
    wide, high = (max(round(side * scale), layout.least) for side in image.size)
    canvas = Image.new("RGB", (layout.side, layout.side), layout.color)
    canvas.paste(resized(image, (high, wide), preparation), ((layout.side - wide) // 2, (layout.side - high) // 2))
    return _one(canvas, preparation)


def _views(image: Image.Image, layout: PaddedViews, preparation: Preparation, *, several: bool) -> LaidOut:
    tile, patch, side = layout.tile, preparation.patch, preparation.side
    size = (tile, tile) if several else best_size(image.height, image.width, layout.sizes)
    whole, fitted = (
        ImageOps.pad(image, (wide, high), Image.Resampling(preparation.resample), layout.color)
        for high, wide in ((tile, tile), size)
    )
    along = -(-(tile // patch) // side)  # merged patches along a side, the last of which may be filled up
    tiles = []
    for each in (whole, *cut(fitted, tile)):
        filled = Image.new("RGB", (along * side * patch,) * 2)
        filled.paste(each.crop((0, 0, tile // patch * patch, tile // patch * patch)), (0, 0))
        tiles.append(filled)
    grids = np.arange(along**2).reshape(along, along), tiled_grid(size[0] // tile, size[1] // tile, along)
    lines = [np.pad(grid, ((0, 0), (0, 1)), constant_values=-1).reshape(-1, 1) for grid in grids]
    return _summed(tiles, np.concatenate([lines[0], [[-2]], lines[1]]), None)


def _covered(image: Image.Image, layout: Covering, preparation: Preparation) -> LaidOut:
    tile, text = layout.tile, preparation.text
    assert isinstance(text, Gridded)
    rows, columns = covering_grid(image.height, image.width, layout) if layout.most > 1 else (1, 1)
    tiles = [resized(image, (tile, tile), preparation)]
    if rows * columns > 1:
        tiles += cut(resized(image, (rows * tile, columns * tile), preparation), tile)
    else:
        rows = columns = 0
    along = tile // preparation.patch // preparation.side
    learned = {name: -1 - number for number, name in enumerate(preparation.row_texts)}
    sources, first = [], 0
    for part in text.parts(Arrangement(rows, columns, along, along, 0)):
        if isinstance(part, int):
            sources.append(np.arange(first, first + part))
            first += part
        else:
            sources.append(np.array([learned[part]]))
    order = np.concatenate(sources)
    arrangement = Arrangement(rows, columns, along, along, len(order))
    return LaidOut(tiles, arrangement, order[:, None].astype(np.int32), np.ones((len(order), 1), np.float32))


def _quartered(image: Image.Image, layout: Quartered, preparation: Preparation) -> LaidOut:
    text, patch = preparation.text, preparation.patch
    assert isinstance(text, Fenced)
    views = [image]
    if not layout.whole_alone:
        wide, high = image.width // 2, image.height // 2
        if not wide or not high:
            raise InvalidRequest(
                f"the image is {image.width} x {image.height} pixels, which cannot be cut into quarters"
            )
        columns, rows = ((0, wide), (wide, image.width)), ((0, high), (high, image.height))
        views = [*(image.crop((left, top, right, end)) for top, end in rows for left, right in columns), image]
    tiles = []
    for view in views:
        scaled = resized(view, quartered_size(view.height, view.width, layout), preparation)
        # What is less than a patch is not seen.
        tiles.append(scaled.crop((0, 0, scaled.width // patch * patch, scaled.height // patch * patch)))
    return LaidOut(tiles, Arrangement(0, 0, 1, text.rows, text.rows * len(tiles)))


def _windowed(image: Image.Image, layout: Windowed, preparation: Preparation) -> LaidOut:
    tile, patch, text = layout.tile, preparation.patch, preparation.text
    assert isinstance(text, Columned)
    edge, along = layout.before + layout.after, tile // patch
    whole = windows_of(np.arange(along**2).reshape(along, along), layout.side)
    if not layout.most:
        return _of_windows([mixed_of_four(image, (tile, tile))], [whole], preparation)
    grid, window = windowed_grid(image.height, image.width, layout), tile - edge
    height, width = (count * window + edge for count in grid)
    large = mixed_of_four(image, (height, width))
    corners = [(column * window, row * window) for row in range(grid[0]) for column in range(grid[1])]
    tiles = [mixed_of_four(image, (tile, tile)), *(large.crop((x, y, x + tile, y + tile)) for x, y in corners)]
    margins = window // patch, layout.before // patch, layout.after // patch
    (rows, row), (columns, column) = (in_tiles(count, *margins) for count in grid)
    places = (1 + rows[:, None] * grid[1] + columns) * along**2 + row[:, None] * along + column
    return _of_windows(tiles, [whole, windows_of(places, layout.side)], preparation)


def _of_windows(tiles: Sequence[Image.Image], views: Sequence[NDArray[np.int32]], preparation: Preparation) -> LaidOut:
    """A picture whose rows are windows of patches, with learned rows at the texts among them.

    Args:
        views: i32 [rows, columns, J] each; -1: no patch.
    """
    height, width, count = views[-1].shape
    windows = np.concatenate([view.reshape(-1, count) for view in views])
    arrangement = Arrangement(0, 0, height, width, 0)
    learned = {name: -1 - number for number, name in enumerate(preparation.row_texts)}
    sources, shares, first = [], [], 0
    for part in preparation.text.parts(arrangement):
        if isinstance(part, int):
            own = windows[first : first + part]
            known, first = own >= 0, first + part
            sources.append(np.maximum(own, 0))
            shares.append(known / known.sum(axis=1, keepdims=True))
        else:
            sources.append(np.full((1, count), learned[part]))
            shares.append(np.zeros((1, count)))
    order = np.concatenate(sources).astype(np.int32)
    return LaidOut(tiles, replace(arrangement, num_rows=len(order)), order, np.concatenate(shares).astype(np.float32))


def mixed_of_four(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """A picture of another height and width, each of whose pixels is mixed of four.

    Formula: torch's ``interpolate`` with mode bilinear, which does not average where it shrinks; with the fused
    products of one of its threads and in their order, which decides where a sum lies between two bytes.
    """
    values, places = np.asarray(image).astype(np.float32), []
    for count, target in zip(values.shape[:2], size, strict=True):
        ratio = np.float64(np.float32(count) / np.float32(target))
        at = np.maximum(((np.arange(target) + 0.5) * ratio - 0.5).astype(np.float32), 0)
        low = np.minimum(at.astype(np.int32), count - 1)
        share = np.clip(at - low, 0, 1).astype(np.float32)
        places.append(((low, 1 - share), (np.minimum(low + 1, count - 1), share)))
    products = [
        (values[rows][:, columns], (down[:, None] * across)[..., None])
        for rows, down in places[0]
        for columns, across in places[1]
    ]
    mixed = products[1][0] * products[1][1]
    for near, share in (products[0], products[2], products[3]):
        mixed = (near.astype(np.float64) * share + mixed).astype(np.float32)
    return Image.fromarray(np.clip(np.round(mixed), 0, 255).astype(np.uint8))


def _overlapped(image: Image.Image, layout: Overlapped, preparation: Preparation) -> LaidOut:
    tile, patch = layout.tile, preparation.patch
    window, along, margin = tile - 2 * layout.margin, tile // patch, layout.margin // patch
    grid = overlapped_grid(image.height, image.width, layout)
    large = resized(image, tuple(count * window + 2 * layout.margin for count in grid), preparation)  # type: ignore[arg-type]
    corners = [(column * window, row * window) for row in range(grid[0]) for column in range(grid[1])]
    tiles = [resized(image, (tile, tile), preparation), *(large.crop((x, y, x + tile, y + tile)) for x, y in corners)]
    # Of each line and column of patches: the tile that it is taken from, and its place in it.
    lines = []
    for count in grid:
        of, within = in_tiles(count, window // patch, margin, margin)
        lines.append((of, within, pooled(len(of), along)))
    (rows, row, down), (columns, column, across) = lines
    whole = (1 + rows[:, None] * grid[1] + columns) * along**2 + row[:, None] * along + column
    most = max(end - start for start, end in down) * max(end - start for start, end in across)
    sources, shares = np.zeros((2 * along**2, most), np.int32), np.zeros((2 * along**2, most), np.float32)
    sources[::2, 0], shares[::2, 0] = np.arange(along**2), 1
    for number, ((top, bottom), (left, right)) in enumerate((y, x) for y in down for x in across):
        cells = whole[top:bottom, left:right].reshape(-1)
        sources[2 * number + 1, : len(cells)], shares[2 * number + 1, : len(cells)] = cells, 1 / len(cells)
    return LaidOut(tiles, Arrangement(0, 0, 1, along**2, along**2), sources, shares)


def _cropped(image: Image.Image, layout: Cropped, preparation: Preparation) -> LaidOut:
    short, long = sorted(image.size)
    longer = int(layout.shortest * long / short)
    size = (longer, layout.shortest) if image.width <= image.height else (layout.shortest, longer)
    if max(size) > MAX_ASPECT * layout.shortest:
        raise InvalidRequest(f"the image is {image.width} x {image.height} pixels; its sides differ too much")
    scaled = resized(image, size, preparation)
    top, left = ((side - layout.crop) // 2 for side in size)
    return _one(scaled.crop((left, top, left + layout.crop, top + layout.crop)), preparation)


def _pooled(image: Image.Image, layout: Pooled, preparation: Preparation) -> LaidOut:
    whole, side = laid_out(image, replace(preparation, layout=layout.of)), layout.side
    height, width = whole.arrangement.height, whole.arrangement.width
    grid = np.arange(height * width).reshape(height, width)
    if layout.mixed:
        sources, shares = bilinear(grid, -(-height // side), -(-width // side))
        return _summed(whole.tiles, sources.reshape(-1, CORNERS), shares.reshape(-1, CORNERS))
    rows, columns = height // side, width // side
    squares = grid[: rows * side, : columns * side].reshape(rows, side, columns, side).swapaxes(1, 2)
    sources = squares.reshape(-1, side**2)
    return _summed(whole.tiles, sources, np.full(sources.shape, 1 / side**2))


def _split(image: Image.Image, layout: Split, preparation: Preparation) -> LaidOut:
    tile = layout.tile
    image = resized(image, split_size(image.height, image.width, layout), preparation)
    if not layout.tiled:
        return _one(resized(image, (tile, tile), preparation), preparation)
    size = tiled_size(image.height, image.width, tile)
    image = resized(image, size, preparation)
    if size == (tile, tile):
        return _one(image, preparation)
    tiles = [*cut(image, tile), resized(image, (tile, tile), preparation)]
    return _many(tiles, size[0] // tile, size[1] // tile, preparation)


def _on_grid(image: Image.Image, layout: NearestGrid, preparation: Preparation) -> LaidOut:
    rows, columns = nearest_grid(image.height, image.width, layout)
    tiles = cut(resized(image, (rows * layout.tile, columns * layout.tile), preparation), layout.tile)
    if layout.overview and len(tiles) > 1:
        tiles.append(resized(image, (layout.tile, layout.tile), preparation))
    return _many(tiles, rows, columns, preparation)


def _on_canvas(image: Image.Image, layout: Canvas, preparation: Preparation) -> LaidOut:
    tile, grid = layout.tile, best_canvas(image.height, image.width, layout)
    canvas = Image.new("RGB", (grid[1] * tile, grid[0] * tile))
    canvas.paste(resized(image, undistorted(image.height, image.width, layout, grid), preparation), (0, 0))
    if grid == (1, 1):
        return _one(canvas, preparation)
    return _many([*cut(canvas, tile), resized(image, (tile, tile), preparation)], *grid, preparation)


def _fitted(image: Image.Image, layout: Pinpoints, preparation: Preparation, *, several: bool) -> LaidOut:
    tile, along = layout.tile, layout.tile // preparation.patch
    base = np.arange(along**2)[:, None]
    if several and layout.padding is not None:
        side = max(image.size)
        square = Image.new("RGB", (side, side), layout.padding)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return _summed([resized(square, (tile, tile), preparation)], np.concatenate([base, [[-1]]]), None)
    target = best_size(image.height, image.width, layout.sizes)
    fitted = resized(image, fitted_size(image.height, image.width, target), preparation)
    canvas = Image.new("RGB", (target[1], target[0]))
    canvas.paste(fitted, ((target[1] - fitted.width) // 2, (target[0] - fitted.height) // 2))
    tiles = [resized(image, (tile, tile), preparation), *cut(canvas, tile)]
    grid = unpadded(tiled_grid(target[0] // tile, target[1] // tile, along), image.height, image.width)
    sources, shares = grid[..., None], np.ones((*grid.shape, 1), np.float32)
    if layout.most is not None:
        ratio = math.sqrt(grid.shape[0] * grid.shape[1] / (layout.most * along**2))
        if ratio > SHRUNK_FROM:
            sources, shares = bilinear(grid, int(grid.shape[0] // ratio), int(grid.shape[1] // ratio))
        elif sources.shape[-1] < CORNERS:
            sources = np.pad(sources, ((0, 0), (0, 0), (0, CORNERS - 1)))
            shares = np.pad(shares, ((0, 0), (0, 0), (0, CORNERS - 1)))
    lines = np.pad(sources, ((0, 0), (0, 1), (0, 0)))
    line_shares = np.pad(shares, ((0, 0), (0, 1), (0, 0)))
    lines[:, -1], line_shares[:, -1] = -1, 0
    line_shares[:, -1, 0] = 1
    width = lines.shape[-1]
    all_sources = np.concatenate([np.pad(base, ((0, 0), (0, width - 1))), lines.reshape(-1, width)])
    of_base = np.pad(np.ones_like(base, np.float32), ((0, 0), (0, width - 1)))
    return _summed(tiles, all_sources, np.concatenate([of_base, line_shares.reshape(-1, width)]))


def cut(image: Image.Image, tile: int | tuple[int, int]) -> list[Image.Image]:
    """The tiles of a picture, line by line; the last ones are smaller where its sides are not multiples of a tile's.

    Args:
        tile: their height and width, or both.
    """
    high, wide = (tile, tile) if isinstance(tile, int) else tile
    corners = [(x, y) for y in range(0, image.height, high) for x in range(0, image.width, wide)]
    return [image.crop((x, y, min(x + wide, image.width), min(y + high, image.height))) for x, y in corners]


def _one(tile: Image.Image, preparation: Preparation) -> LaidOut:
    unit = preparation.patch * preparation.side
    height, width = tile.height // unit, tile.width // unit
    num_rows = 1 if preparation.single else height * width + preparation.class_row
    return LaidOut([tile], Arrangement(0, 0, height, width, num_rows))


def _many(tiles: Sequence[Image.Image], rows: int, columns: int, preparation: Preparation) -> LaidOut:
    unit = preparation.patch * preparation.side
    height, width = tiles[0].height // unit, tiles[0].width // unit
    return LaidOut(tiles, Arrangement(rows, columns, height, width, height * width * len(tiles)))


def _summed(tiles: Sequence[Image.Image | Interpolated], sources: NDArray[Any], shares: NDArray[Any] | None) -> LaidOut:
    if shares is None:
        shares = np.ones_like(sources)
    arrangement = Arrangement(0, 0, 1, len(sources), len(sources))
    return LaidOut(tiles, arrangement, sources.astype(np.int32), shares.astype(np.float32))


def _whole(image: Image.Image, size: tuple[int, int], preparation: Preparation) -> LaidOut:
    """A picture as one tile of a height and width."""
    return _one(resized(image, size, preparation), preparation)


def resized(image: Image.Image, size: tuple[int, int], preparation: Preparation) -> Image.Image:
    """A picture of another height and width.

    Raises:
        InvalidRequest: it would have more pixels than a file may.
    """
    height, width = size
    if height * width > MOST_RESIZED:
        raise InvalidRequest(f"the image becomes {width} x {height} pixels, more than {MOST_RESIZED}")
    return image.resize((width, height), resample=Image.Resampling(preparation.resample))
