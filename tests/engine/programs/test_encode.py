"""Parts of an encoder's run, and runs of several images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.engine.core.media import Encoding, PromptImage, PromptMedia
from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.commands import PlaceImages, RunEncoder
from llmjax.engine.device.encoder import EncoderPrograms, EncoderRun, commands_of
from llmjax.engine.programs.encode import parts_of
from llmjax.errors import CompileError
from llmjax.media.image import PreparedImage
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.spec import VisionAttention, VisionLayer, VisionSpec

LAYER = VisionLayer(
    attention=VisionAttention(heads=2, head_dim=4), feed_forward=MLP(inner=10, activation="gelu"), norm=Layer(1e-6)
)
SPEC = VisionSpec(patch_values=3, size=8, out=8, layers=(LAYER,) * 5, side=2, tile=16)
COST = 16 * (4 * 8 * 8 + 2 * 8 * 10 + 2 * 16 * 8)  # of a layer of a tile


@given(st.floats(1, 10 * COST))
def test_parts_have_all_layers_in_order_and_no_more_than_they_may(products: float) -> None:
    parts = parts_of(SPEC, 16, products=products)
    assert [layer for part in parts for layer in part] == list(range(5))
    assert all(len(part) == 1 or len(part) * COST <= products for part in parts)
    assert all(len(part) == int(max(products // COST, 1)) for part in parts[:-1])


def test_windows_cost_less_and_no_layers_are_a_part() -> None:
    windowed = replace(SPEC, tile=None, window=2, layers=(replace(LAYER, windowed=True),) * 2)
    assert len(parts_of(windowed, 16, products=2 * COST - 1)) == 1
    assert parts_of(replace(SPEC, layers=()), 16, products=1.0) == [range(0)]


def image(tiles: int, name: str = "a") -> Encoding:
    patches = np.full((16 * tiles, 3), tiles, np.float32)
    prepared = PreparedImage(patches=patches, grid=(tiles, 4, 4), num_rows=4 * tiles, tokens=(0,), digest=name.encode())
    return Encoding(prepared, np.arange(4 * tiles, dtype=np.int32) + 100 * tiles)


def prompt(*images: Encoding) -> PromptMedia:
    rows = np.zeros(1, np.int32)
    return PromptMedia(images=tuple(PromptImage(start=0, end=1, rows=rows, image=one.image) for one in images))


def test_images_share_a_run_when_there_is_a_program_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmjax.engine.device.encoder.MOST_PATCHES", 64)
    built: list[Bucket] = []
    programs = EncoderPrograms(SPEC, parts=lambda patches: 2, build=lambda bucket: built.append(bucket) or print)
    try:
        one, two = image(1), image(2)
        assert programs.ready(prompt(one, two), seconds=60)
        assert {bucket.tokens for bucket in built} == {16, 32}
        assert programs.together([one, one]) == 2  # 32 patches: there is one
        assert programs.together([one, two]) in (1, 2)  # 48 are asked for
        assert programs._program(48, False).result() is None
        assert programs.together([one, two]) == 2
        assert programs.together([one, two, two, two]) == 2  # no more than 64
        assert programs.together([image(9), one]) == 1
        assert sorted((bucket.tokens, bucket.rows) for bucket in built) == [
            (n, i) for n in (16, 32, 48) for i in (0, 1)
        ]
    finally:
        programs.close()


def test_a_program_that_does_not_compile_is_an_error() -> None:
    def build(bucket: Bucket) -> Any:
        raise ValueError("no")

    programs = EncoderPrograms(SPEC, parts=lambda patches: 1, build=build)
    try:
        with pytest.raises(CompileError, match="no"):
            programs.ready(prompt(image(1)), seconds=60)
    finally:
        programs.close()


def test_commands_of_a_run() -> None:
    commands = commands_of(SPEC, [image(1), image(2)], parts=3, nowhere=999)
    applied: list[Any] = []
    run = EncoderRun([image(1), image(2)], commands, applied.append)
    assert run.left == 3
    run.start_part()
    assert run.left == 2
    placed, first = applied
    assert isinstance(placed, PlaceImages) and first == RunEncoder(Bucket(tokens=48, rows=0, decode=False))
    assert placed.places.tolist() == [*range(100, 104), *range(200, 208)]
    assert placed.batch["patches"][:, 0].tolist() == [1.0] * 16 + [2.0] * 32
    while run.left:
        run.start_part()
    assert [command.bucket.rows for command in applied[1:]] == [0, 1, 2]
