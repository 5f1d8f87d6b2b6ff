"""The encoder's own parts, on random weights: packing changes nothing, and each part of a spec has an effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from llmjax.kernels.registry import traced_for
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.batch import PatchBatch
from llmjax.models.vision.functional import abstract_encoder, encode
from llmjax.models.vision.packing import bucket, cells_of, num_rows, pack, positions_of
from llmjax.models.vision.spec import (
    Merged,
    Normed,
    Projected,
    Rope2D,
    TablePositions,
    VisionAttention,
    VisionLayer,
    VisionSpec,
)

RNG = np.random.default_rng(0)


@dataclass
class Picture:
    patches: NDArray[np.float32]
    grid: tuple[int, int, int]
    num_rows: int
    sources: NDArray[np.int32] | None = None
    shares: NDArray[np.float32] | None = None
    further: tuple[tuple[int, int, int], ...] = ()
    unseen: NDArray[np.int32] | None = None


def picture(spec: VisionSpec, rows: int, columns: int, frames: int = 1) -> Picture:
    count = frames * rows * columns
    values = RNG.standard_normal((count, spec.patch_values)).astype(np.float32)
    return Picture(values, (frames, rows, columns), count // spec.side**2)


def spec_of(**changes: Any) -> VisionSpec:
    layer = VisionLayer(
        attention=VisionAttention(heads=3, head_dim=8),
        feed_forward=MLP(inner=40, activation="gelu"),
        norm=Layer(1e-6),
    )
    fields: dict[str, Any] = {
        "patch_values": 12,
        "size": 20,
        "out": 16,
        "layers": (layer, VisionLayer(**{**layer.__dict__, "windowed": "window" in changes})),
        "side": 2,
        "projector": (Normed(Layer(1e-6)), Merged(2), Projected(16, activation="gelu")),
        **changes,
    }
    return VisionSpec(**fields)


def run(
    spec: VisionSpec, pictures: list[Picture], *, patches: int | None = None, dtype: Any = jnp.float32
) -> tuple[np.ndarray, np.ndarray]:
    graph, shapes = abstract_encoder(spec, dtype=dtype, activation_dtype=jnp.float32)
    rng = np.random.default_rng(7)
    params = {name: jnp.asarray(rng.standard_normal(like.shape) * 0.3, like.dtype) for name, like in shapes.items()}
    total = sum(len(each.patches) for each in pictures)
    batch = PatchBatch(
        **{k: jnp.asarray(v) for k, v in pack(spec, pictures, patches=patches or bucket(spec, total)).items()}
    )
    out = jax.jit(lambda params, batch: encode(graph, params, batch))(params, batch)
    used = sum(each.num_rows for each in pictures)
    return np.asarray(out.rows)[:used], np.asarray(out.tapped)[:, :used]


SPECS = {
    "rope": spec_of(rope=Rope2D()),
    "windows": spec_of(rope=Rope2D(), window=4),
    "table": spec_of(table=TablePositions(rows=8, columns=8)),
    "corners": spec_of(table=TablePositions(rows=5, columns=6, between="corners")),
    "deepstack": spec_of(rope=Rope2D(), tapped=(0,), tap=(Merged(2), Normed(Layer(1e-6)), Projected(16))),
    "class": spec_of(class_token=True, tile=24, table=TablePositions(rows=4, columns=6)),
    "newline": spec_of(learned=1, sources=2, tile=16),
}


@pytest.mark.parametrize("name", SPECS)
def test_pictures_packed_together_are_as_alone(name: str) -> None:
    spec = SPECS[name]
    grids = [(4, spec.tile // 4)] * 2 if spec.tile else [(4, 6), (6, 2), (2, 8)]
    pictures = [picture(spec, *grid) for grid in grids]
    if spec.learned:
        pictures[1].sources, pictures[1].shares = np.array([[2, 0], [-1, 0]], np.int32), np.ones((2, 2), np.float32)
        pictures[1].num_rows = 2
    together, tapped = run(spec, pictures)
    alone = [run(spec, [each], patches=96) for each in pictures]
    np.testing.assert_allclose(together, np.concatenate([rows for rows, _ in alone]), atol=1e-5)
    np.testing.assert_allclose(tapped, np.concatenate([each for _, each in alone], axis=1), atol=1e-5)
    assert len(tapped) == len(spec.tapped)


@pytest.mark.parametrize("name", ["class", "newline"])
def test_tiles_one_by_one_are_as_together(name: str) -> None:
    """On a CPU; other devices take them at once."""
    spec = SPECS[name]
    assert spec.tile is not None
    pictures = [picture(spec, 4, spec.tile // 4) for _ in range(3)]
    together, _ = run(spec, pictures)
    with traced_for("cpu"):
        one_by_one, _ = run(spec, pictures)
    np.testing.assert_allclose(one_by_one, together, atol=1e-5)


def test_matrices_of_16_bits_make_nearly_the_same_rows_in_f32() -> None:
    spec = SPECS["rope"]
    one = picture(spec, 6, 4)
    exact, near = run(spec, [one])[0], run(spec, [one], dtype=jnp.bfloat16)[0]
    assert near.dtype == np.float32
    assert 0 < np.abs(near - exact).max() < 0.03 * np.abs(exact).max()


def test_frames_do_not_see_each_other() -> None:
    spec = SPECS["windows"]
    two = picture(spec, 4, 6, frames=2)
    first = Picture(two.patches[:24], (1, 4, 6), 6)
    np.testing.assert_allclose(run(spec, [two])[0][:6], run(spec, [first])[0], atol=1e-5)


def test_windows_stand_together_and_rows_in_order() -> None:
    spec = SPECS["windows"]
    one = picture(spec, 6, 10, frames=2)
    arrays = pack(spec, [one], patches=bucket(spec, 120))
    windows = arrays["windows"][:120]
    assert (np.diff(windows) >= 0).all() and windows[-1] == 11
    at = arrays["positions"][:120:4][arrays["order"][:15]]
    assert at.tolist() == positions_of(6, 10, 2)[::4].tolist()
    assert sorted(arrays["order"].tolist()) == list(range(bucket(spec, 120) // 4))


def test_windows_and_learned_rows_count() -> None:
    spec = SPECS["newline"]
    one = picture(spec, 4, 4)
    plain, _ = run(spec, [one])
    lined = Picture(one.patches, one.grid, 3, np.array([[0], [-1], [3]], np.int32), np.ones((3, 1), np.float32))
    rows, _ = run(spec, [lined])
    np.testing.assert_allclose(rows[[0, 2]], plain[[0, 3]], atol=1e-6)
    assert np.abs(rows[1] - plain).max(axis=1).min() > 0.1
    wide = picture(SPECS["windows"], 4, 8)
    assert np.abs(run(SPECS["windows"], [wide])[0] - run(spec_of(rope=Rope2D(), window=8), [wide])[0]).max() > 1e-3


def test_squares_come_one_after_another() -> None:
    assert positions_of(2, 4, 2).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]


def test_corners_of_the_grid_have_the_table_s_corners() -> None:
    at = positions_of(3, 2, 1)
    cells, shares = cells_of(at, 3, 2, TablePositions(rows=4, columns=5, between="corners"))
    assert cells[np.arange(6), shares.argmax(axis=1)].tolist()[:2] == [0, 4]
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    np.testing.assert_allclose(shares[2], [0.5, 0, 0.5, 0])  # halfway between rows 1 and 2
    assert cells[2, [0, 2]].tolist() == [5, 10]


def test_buckets_hold_what_is_asked_and_grow_slowly() -> None:
    spec = SPECS["rope"]
    sizes = [bucket(spec, count) for count in range(1, 300)]
    assert all(size >= count and size % 4 == 0 for count, size in zip(range(1, 300), sizes, strict=True))
    assert sorted(set(sizes)) == [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    assert num_rows(spec, 48) == 12 and num_rows(SPECS["newline"], 64) == 24


def test_too_many_patches_are_refused() -> None:
    with pytest.raises(ValueError, match="32 patches do not fit in 16"):
        pack(SPECS["rope"], [picture(SPECS["rope"], 4, 8)], patches=16)
