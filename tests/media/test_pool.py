"""Processes that prepare pictures, and what a picture may take of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from llmjax.errors import InvalidRequest
from llmjax.media.pool import PicturePool, PictureProcessError
from llmjax.media.reply import PictureLimits, decoded
from tests.media.obedient import Obedient

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def pool() -> Iterator[PicturePool]:
    limits = PictureLimits(cpu_seconds=1.0, wall_seconds=60.0)
    pool = PicturePool(Obedient(), size=1, limits=limits)
    yield pool
    pool.close()


def test_pictures_come_back_as_they_were_prepared(pool: PicturePool) -> None:
    image = pool.prepare(b"abc")
    np.testing.assert_array_equal(image.patches, np.float32([[97, 98, 99]]))
    np.testing.assert_array_equal(pool.prepare(b"abc", several=True).patches, 2 * image.patches)
    assert image.sources is not None and image.sources.dtype == np.int32
    assert (image.grid, image.tokens, image.digest, image.shares) == ((1, 1, 1), (8,), bytes(32), None)


@pytest.mark.parametrize(
    "word,reason",
    [
        (b"compute", "preparing it took more than 1 s of computing time"),
        (b"memory", "preparing it needs more than 4096 MiB of memory"),
        (b"exit", r"preparing it ended its process \(exit status 3\)"),
        (b"fail", r"it cannot be decoded \(ZeroDivisionError\)"),
        (b"refuse", "the picture is not supported"),
    ],
)
def test_a_bad_picture_costs_its_own_request(pool: PicturePool, word: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{reason}$"):
        pool.prepare(word)
    assert pool.prepare(b"a").patches.tolist() == [[97.0]]


def test_a_picture_that_waits_is_given_up() -> None:
    pool = PicturePool(Obedient(), size=1, limits=PictureLimits(wall_seconds=0.5))
    with pytest.raises(InvalidRequest, match=r"^preparing it took more than 0\.5 s$"):
        pool.prepare(b"sleep")
    pool.close()


def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmjax.media.pool.python_path", lambda: os.devnull)
    with pytest.raises(PictureProcessError, match="did not start"):
        PicturePool(Obedient(), size=1).prepare(b"a")


def test_replies_hold_numbers_only() -> None:
    import msgspec

    bad = msgspec.msgpack.encode({"image": None, "error": 3})
    with pytest.raises(msgspec.DecodeError):
        decoded(bad)
    array = ["object", [1], b"12345678"]
    fields = {"patches": array, "grid": [1, 1, 1], "num_rows": 1, "tokens": [1], "digest": b""}
    with pytest.raises(msgspec.DecodeError, match="an array of another type"):
        decoded(msgspec.msgpack.encode({"image": fields, "error": None}))
