"""Packs prepared pictures into the arrays of a `PatchBatch`; NumPy alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmjax.models.vision.spec import TablePositions, VisionSpec

UNSEEN = -2
"""``UNSEEN - s`` is the segment of a patch that sees those of ``s`` and that none sees, as `attend_segments` has it."""


class Picture(Protocol):
    """What packing needs of a picture; ``llmjax.media.image.PreparedImage`` is one."""

    @property
    def patches(self) -> NDArray[np.float32]: ...

    @property
    def grid(self) -> tuple[int, int, int]: ...

    @property
    def further(self) -> tuple[tuple[int, int, int], ...]: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def sources(self) -> NDArray[np.int32] | None: ...

    @property
    def shares(self) -> NDArray[np.float32] | None: ...

    @property
    def unseen(self) -> NDArray[np.int32] | None: ...


def bucket(spec: VisionSpec, patches: int) -> int:
    """The number of patches to which a batch is padded: a unit times 1, 2, 3, 4, 6, 8, 12 and so on."""
    units = max(1, -(-patches // spec.unit))
    power = 1 << (units - 1).bit_length()
    return spec.unit * (power * 3 // 4 if power >= 4 and units <= power * 3 // 4 else power)


def num_rows(spec: VisionSpec, patches: int) -> int:
    """The feature rows of a batch with this number of patches, padding among them."""
    if spec.resampler is not None:
        return patches // spec.unit * spec.resampler.queries
    rows = patches // spec.side**2
    if spec.class_row != "none":
        assert spec.tile is not None
        return patches // spec.tile + (rows if spec.class_row == "first" else 0)
    if spec.windowing is not None:
        assert spec.tile is not None
        across = -(-math.isqrt(spec.tile) // spec.windowing.side)
        return patches // spec.tile * (across * (across + 1) + 2)  # lines with their ends, and what is around them
    if not spec.learned:
        return rows // spec.joined
    assert spec.tile is not None
    ends = rows // math.isqrt(spec.tile // spec.side**2)  # each line of a tile may end with one
    return rows + ends + (spec.learned - 1) * (patches // spec.tile)


def pack(spec: VisionSpec, pictures: Sequence[Picture], *, patches: int) -> dict[str, NDArray[Any]]:
    """The fields of a `PatchBatch` by name; the pictures' feature rows stand one after another in their order.

    Args:
        patches: patches of the batch, from `bucket` of the pictures' sum.

    Raises:
        ValueError: the pictures have more patches than that.
    """
    used = sum(len(picture.patches) for picture in pictures)
    if used > patches or patches % spec.unit:
        raise ValueError(f"{used} patches do not fit in {patches}, a multiple of {spec.unit}")
    values = np.zeros((patches, spec.patch_values), np.float32)
    segments = np.full(patches, -1, np.int32)
    windows = np.full(patches, -1, np.int32)
    order = np.arange(patches // spec.side**2, dtype=np.int32)
    positions = np.zeros((patches, 2), np.int32)
    mixed = 1 if spec.table is None else spec.table.mixed
    places = np.zeros((patches, mixed), np.int32)
    place_shares = np.zeros((patches, mixed), np.float32)
    start = segment = window = 0
    for given, (frames, rows, columns), unseen in (run for picture in pictures for run in _runs(picture)):
        part = slice(start, start + len(given))
        at = positions_of(rows, columns, spec.side)
        moved: NDArray[Any] | slice = slice(None)
        if spec.window is not None:
            of_frame, count = windows_of(at, rows, columns, spec.window)
            by_window = np.argsort(of_frame[:: spec.side**2], kind="stable")  # squares lie in a window as a whole
            moved = (by_window[:, None] * spec.side**2 + np.arange(spec.side**2)).reshape(-1)
            squares = np.arange(frames)[:, None] * len(by_window) + np.argsort(by_window)
            order[start // spec.side**2 :][: squares.size] = start // spec.side**2 + squares.reshape(-1)
            at = at[moved]
            windows[part] = window + np.concatenate([of_frame[moved] + frame * count for frame in range(frames)])
            window += frames * count
        own = given.reshape(frames, rows * columns, -1)[:, moved]
        if own.shape[-1] != spec.patch_values:  # a still's, which are those of each frame
            own = np.repeat(own.reshape(*own.shape[:2], 3, 1, -1), spec.frames, axis=3)
        values[part] = own.reshape(-1, spec.patch_values)
        positions[part] = np.tile(at, (frames, 1))
        segments[part] = segment + np.repeat(np.arange(frames), rows * columns)
        if spec.filled_from is not None:
            segments[part][np.tile((at >= spec.filled_from).any(axis=1), frames)] = -1
            at = np.minimum(at, spec.filled_from - 1)  # for which there are positions
        if spec.table is not None:
            cells, shares = cells_of(at, rows, columns, spec.table)
            places[part] = np.tile(cells, (frames, 1)) + spec.class_token
            place_shares[part] = np.tile(shares, (frames, 1))
        if unseen.any():
            assert spec.table is not None and spec.table.between == "buckets" and spec.window is None
            segments[part] = np.where(unseen, UNSEEN - segments[part], segments[part])
            places[part] = np.concatenate([_places_shown(at, own, spec.table) for own in unseen.reshape(frames, -1)])
        start, segment = part.stop, segment + frames
    found: dict[str, NDArray[Any]] = {"patches": values, "segments": segments, "positions": positions}
    if spec.window is not None:
        found |= {"windows": windows, "order": order}
    if spec.table is not None:
        found |= {"places": places, "place_shares": place_shares}
    if spec.sources:
        found |= _sources(spec, pictures, num_rows(spec, patches) * spec.joined)
    return found


def _runs(picture: Picture) -> Iterator[tuple[NDArray[np.float32], tuple[int, int, int], NDArray[np.bool_]]]:
    """The patches of each group of tiles of one size, how many there are, and which of them no other sees."""
    unseen = np.zeros(len(picture.patches), bool)
    if picture.unseen is not None:
        unseen[picture.unseen] = True
    start = 0
    for grid in (picture.grid, *picture.further):
        end = start + math.prod(grid)
        yield picture.patches[start:end], grid, unseen[start:end]
        start = end


def _places_shown(at: NDArray[np.int32], unseen: NDArray[np.bool_], table: TablePositions) -> NDArray[np.int32]:
    """The cells of a tile's patches, i32 [P, 1]: the table is stretched over those that are seen, and others have the
    first cell."""
    rows, columns = at[~unseen].max(axis=0) + 1
    cells, _ = cells_of(at, int(rows), int(columns), table)
    return np.where(unseen[:, None], 0, cells)


def positions_of(rows: int, columns: int, side: int) -> NDArray[np.int32]:
    """Row and column of each patch of a frame, i32 [rows * columns, 2], square by square of ``side`` patches."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    squares = grid.reshape(rows // side, side, columns // side, side, 2).swapaxes(1, 2)
    return squares.reshape(-1, 2).astype(np.int32)


def windows_of(at: NDArray[np.int32], rows: int, columns: int, window: int) -> tuple[NDArray[np.int32], int]:
    """The window of each patch of a frame, i32 [rows * columns], and how many there are."""
    across = -(-columns // window)
    return at[:, 0] // window * across + at[:, 1] // window, across * -(-rows // window)


def cells_of(
    at: NDArray[np.int32], rows: int, columns: int, table: TablePositions
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The cells of the table that make up each patch's position, i32 [P, K], and their weights, f32 [P, K]."""
    if table.between == "axes":
        if rows > table.rows or columns > table.columns:
            raise ValueError(f"a picture of {rows} x {columns} patches has more than the table, {table.rows}")
        return (at[:, ::-1] + [0, table.columns]).astype(np.int32), np.ones((len(at), 2), np.float32)
    if table.between == "cubic":
        return _cubic(at, (rows, columns), table)
    if table.between != "corners":
        if table.between == "buckets":
            at = np.stack([_bucket(at[:, 0], rows, table.rows), _bucket(at[:, 1], columns, table.columns)], axis=1)
        return (at[:, :1] * table.columns + at[:, 1:]).astype(np.int32), np.ones((len(at), 1), np.float32)
    low, high, share = [], [], []
    for axis, (count, cells) in enumerate(((rows, table.rows), (columns, table.columns))):
        place = np.linspace(0, cells - 1, count, dtype=np.float32)[at[:, axis]]
        low.append(place.astype(np.int32))
        high.append(np.minimum(low[-1] + 1, cells - 1))
        share.append(place - low[-1])
    cells_ = [r * table.columns + c for r in (low[0], high[0]) for c in (low[1], high[1])]
    shares = [r * c for r in (1 - share[0], share[0]) for c in (1 - share[1], share[1])]
    return np.stack(cells_, axis=1).astype(np.int32), np.stack(shares, axis=1).astype(np.float32)


def _cubic(
    at: NDArray[np.int32], grid: tuple[int, int], table: TablePositions
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """`cells_of` by cubic convolution; cells beyond an edge are those at it. Formula: torch's ``grid_sample``."""
    near, shares = [], []
    for axis, (count, cells) in enumerate(zip(grid, (table.rows, table.columns), strict=True)):
        place = (at[:, axis].astype(np.float32) + 0.5) * np.float32(cells / count) - 0.5
        low = np.floor(place).astype(np.int32)
        near.append(np.clip(low[:, None] + np.arange(-1, 3), 0, cells - 1))
        shares.append(cubic_shares(place - low))
    cells_ = near[0][:, :, None] * table.columns + near[1][:, None]
    return cells_.reshape(len(at), 16).astype(np.int32), np.einsum("pr,pc->prc", *shares).reshape(len(at), 16)


def cubic_shares(after: NDArray[np.float32], a: float = -0.75) -> NDArray[np.float32]:
    """The weights of four neighbors, f32 [P, 4], of places that lie ``after`` the second, less than one (Keys 1981)."""
    far, near = np.stack([1 + after, 2 - after]), np.stack([after, 1 - after])
    outer = a * (((far - 5) * far + 8) * far - 4)
    inner = ((a + 2) * near - (a + 3)) * near * near + 1
    return np.stack([outer[0], inner[0], inner[1], outer[1]], axis=1).astype(np.float32)


def _bucket(places: NDArray[np.int32], count: int, cells: int) -> NDArray[np.int32]:
    """The cells that places of ``count`` lie in; formula, with its rounding: transformers' Idefics3VisionEmbeddings."""
    step = 1 / cells
    bounds = np.arange(step, 1.0, step).astype(np.float32)
    shares = np.minimum(places.astype(np.float32) * (np.float32(1) / np.float32(count)), np.float32(1 - 1e-6))
    return np.searchsorted(bounds, shares, side="right").astype(np.int32)


def _sources(spec: VisionSpec, pictures: Sequence[Picture], rows: int) -> dict[str, NDArray[Any]]:
    """The merged patches of which each of a batch's feature rows is a sum."""
    sources, shares = np.zeros((rows, spec.sources), np.int32), np.zeros((rows, spec.sources), np.float32)
    row = first = 0
    for picture in pictures:
        merged = len(picture.patches) // spec.side**2
        if picture.sources is None:
            sources[row : row + merged, 0], shares[row : row + merged, 0] = first + np.arange(merged), 1
        else:
            assert picture.shares is not None
            part = slice(row, row + len(picture.sources)), slice(0, picture.sources.shape[1])
            sources[part] = np.where(picture.sources < 0, picture.sources, picture.sources + first)
            shares[part] = picture.shares
        row, first = row + picture.num_rows * spec.joined, first + merged
    return {"sources": sources, "source_shares": shares}
