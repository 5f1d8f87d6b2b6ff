"""Records in a folder: read again, set aside where they are not understood, and never half there."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from llmjax.serve.errors import ApiError
from llmjax.serve.records import RECORD, Records, storing


@dataclass
class Thing:
    id: str
    owner: str
    text: str = ""
    numbers: dict[str, int] | None = None

    __pydantic_config__ = RECORD


def records(folder: Path) -> Records[Thing]:
    return Records(folder, Thing, names="thing-*")


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """The system refuses to make any file larger: it answers as a full disk does, only with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    things = [Thing("thing-1", "a", "é"), Thing("thing-2", "b", numbers={"x": 1})]
    first = records(tmp_path)
    for thing in things:
        first.save(thing)
    later = records(tmp_path)
    assert later.load() == things
    assert later.bytes_of("a") == first.bytes_of("a") == (tmp_path / "thing-1.json").stat().st_size
    later.drop(things[0])
    assert later.bytes_of("a") == 0 and records(tmp_path).load() == things[1:]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "EOF"),
        (b"{", "EOF"),
        (b"[]", "object"),
        (b"\xff", "JSON"),
        (orjson.dumps({"id": "thing-1"}), "owner: Field required"),
        (orjson.dumps({"id": "thing-1", "owner": "a", "later": 1}), "later"),
        (orjson.dumps({"id": "thing-1", "owner": 7}), "owner"),
        (orjson.dumps({"id": "thing-1", "owner": "a", "numbers": {"x": "1"}}), "numbers"),
        (orjson.dumps({"id": "../thing-1", "owner": "a"}), "'../thing-1'"),
    ],
)
def test_what_is_not_understood_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, why: str
) -> None:
    (tmp_path / "thing-1.json").write_bytes(content)
    records(tmp_path).save(Thing("thing-2", "a"))
    with caplog.at_level(logging.WARNING, "serve"):
        assert records(tmp_path).load() == [Thing("thing-2", "a")]
    (record,) = caplog.records
    assert "thing-1.json" in record.getMessage() and why in record.getMessage()
    assert (tmp_path / "thing-1.json.damaged").read_bytes() == content
    assert records(tmp_path).load() == [Thing("thing-2", "a")] and len(caplog.records) == 1


def test_a_full_disk_keeps_the_old_record(tmp_path: Path) -> None:
    kept = records(tmp_path)
    kept.save(Thing("thing-1", "a"))
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        kept.save(Thing("thing-1", "a", "x" * 1000))
    assert records(tmp_path).load() == [Thing("thing-1", "a")]
    assert [path.name for path in tmp_path.iterdir()] == ["thing-1.json"]


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EFBIG, 507), (errno.EIO, 500)]
)
def test_failures_of_the_disk_are_errors_of_the_api(number: int, status: int) -> None:
    with pytest.raises(ApiError) as raised, storing("it cannot be stored"):
        raise OSError(number, os.strerror(number), "/a/path")
    assert raised.value.status == status and raised.value.code == "storage_failed"
    assert raised.value.message == f"it cannot be stored: {os.strerror(number)}"  # no path of this machine


def test_the_device_that_is_always_full() -> None:
    with pytest.raises(ApiError, match="No space left on device") as raised, storing("x"), open("/dev/full", "wb") as f:
        f.write(b"x")
    assert raised.value.status == 507


def test_other_failures_pass() -> None:
    def fail(error: Any) -> None:
        with storing("x"):
            raise error

    for error in (ApiError("no", status=413), ValueError("no")):
        with pytest.raises(type(error), match="no"):
            fail(error)
