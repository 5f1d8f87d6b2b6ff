"""Which patches of a picture's tiles its rows are made of: grids of their indices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def in_tiles(count: int, window: int, before: int, after: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tile that each patch along a side is taken from, and the place of the patch in it.

    Args:
        count: tiles along the side.
        window: patches that are a tile's own.
        before, after: patches at its two edges that are its neighbors', if it has any there.
    """
    at = np.arange(count * window + before + after)
    of = np.clip((at - before) // window, 0, count - 1)
    return of, at - of * window


def windows_of(grid: NDArray[Any], side: int) -> NDArray[np.int32]:
    """A grid of patches by windows, i32 [rows, columns, side²]; -1 where one reaches beyond it, more so at its end."""
    missing = [-size % side for size in grid.shape]
    padded = np.pad(grid, [(size // 2, size - size // 2) for size in missing], constant_values=-1)
    rows, columns = (size // side for size in padded.shape)
    windows = padded.reshape(rows, side, columns, side).swapaxes(1, 2)
    return windows.reshape(rows, columns, side**2).astype(np.int32)


def unpadded(grid: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """The part of a grid that a picture of a height and width covers; formula: transformers' ``unpad_image``."""
    rows, columns = grid.shape
    if width / height > columns / rows:
        margin = (rows - int(round(height * (columns / width), 7))) // 2
        return grid[margin : rows - margin]
    margin = (columns - int(round(width * (rows / height), 7))) // 2
    return grid[:, margin : columns - margin]


def bilinear(grid: NDArray[Any], rows: int, columns: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """A grid of another size whose cells are sums of four, [rows, columns, 4], and the weights of these."""
    places = []
    for count, size in zip(grid.shape, (rows, columns), strict=True):
        at = np.maximum((np.arange(size, dtype=np.float32) + 0.5) * np.float32(count / size) - 0.5, 0)
        low = at.astype(np.int32)
        places.append((low, np.minimum(low + 1, count - 1), (at - low).astype(np.float32)))
    (top, bottom, down), (left, right, across) = places
    cells = [grid[r][:, c] for r in (top, bottom) for c in (left, right)]
    shares = [r[:, None] * c for r in (1 - down, down) for c in (1 - across, across)]
    return np.stack(cells, axis=-1), np.stack(shares, axis=-1).astype(np.float32)


def tiled_grid(rows: int, columns: int, along: int) -> NDArray[Any]:
    """The merged patches of a grid of tiles, which stand tile by tile after those of the whole picture.

    Args:
        rows, columns: tiles.
        along: merged patches along each side of a tile.
    """
    down, across = np.arange(rows * along)[:, None], np.arange(columns * along)
    of_tile = down // along * columns + across // along + 1
    return np.asarray(of_tile * along**2 + down % along * along + across % along)
