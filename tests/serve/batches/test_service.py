"""Batches end, whatever the disk does, and what is known of them is bounded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from llmjax.serve.batches import service
from llmjax.serve.batches.service import Batch, Batches
from llmjax.serve.errors import ApiError
from llmjax.serve.files import FileStore, StoredFile
from llmjax.serve.limits import BodyLimits
from tests.serve.test_records import full_disk

TEXT = "/v1/completions"
ANSWER = b'{"text": "' + b"x" * 2000 + b'"}'


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers everything."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": ANSWER})


def store_of(folder: Path, *, most_bytes: int = 2**20, clock: Callable[[], float] = time.time) -> FileStore:
    return FileStore(folder, most_bytes=most_bytes, lifetime=60, clock=clock)


def batches_of(store: FileStore, *, answering: Any = app) -> Batches:
    return Batches(store, answering, limits=BodyLimits(bytes=1000), width=2)


def requests(store: FileStore, count: int = 3, owner: str = "a") -> StoredFile:
    path = store.new_path()
    lines = [{"custom_id": str(i), "method": "POST", "url": TEXT, "body": {"prompt": "x"}} for i in range(count)]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    return store.keep(path, owner=owner, filename="requests.jsonl", purpose="batch")


async def ended(batches: Batches, file: StoredFile, **options: Any) -> Batch:
    metadata = options.get("metadata")
    batch = batches.create(state={}, owner=file.owner, file=file, endpoint=TEXT, metadata=metadata)
    async with asyncio.timeout(60):
        await batches._tasks[batch.id]
    return batch


def test_a_full_disk_ends_a_batch_and_leaves_nothing(tmp_path: Path) -> None:
    """The results do not fit, but their record does."""
    store = store_of(tmp_path)
    file = requests(store, 20)
    with full_disk(8 * 1024):
        batch = asyncio.run(ended(batches_of(store), file))
    assert batch.status == "failed" and batch.output_file_id is None
    assert batch.errors == [
        {
            "code": "storage_failed",
            "message": "the results cannot be written: File too large",
            "line": None,
            "param": None,
        }
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([file.id, f"{file.id}.json", f"{batch.id}.json"])
    assert batches_of(store_of(tmp_path)).get("a", batch.id).status == "failed"


def test_where_not_even_the_record_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends for this server, and for a later one too; another one is refused, and may begin once there is room."""
    store = store_of(tmp_path)
    file = requests(store)

    async def filling(*call: Any) -> None:
        limit.__enter__() if call[0] is not None and not entered else None
        entered.append(True)
        await app(*call)

    entered: list[bool] = []
    limit = full_disk(10)
    batches = batches_of(store, answering=filling)

    async def run() -> Batch:
        try:
            batch = await ended(batches, file)
            for _ in range(service.MOST_UNFINISHED + 1):
                with pytest.raises(ApiError, match="the batch cannot begin: File too large") as raised:
                    batches.create(state={}, owner="a", file=file, endpoint=TEXT, metadata=None)
                assert raised.value.status == 507
        finally:
            limit.__exit__(None, None, None)
        assert (await ended(batches, file)).status == "completed"
        return batch

    batch = asyncio.run(run())
    assert batch.status == "failed" and batches.of("a")[1] is batch
    later = batches_of(store_of(tmp_path)).get("a", batch.id)
    assert later.status == "failed" and later.errors is not None


def test_ended_batches_make_room_and_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_ENDED", 3)
    store = store_of(tmp_path)
    batches = batches_of(store)
    file = requests(store, 1)

    async def run() -> list[str]:
        return [(await ended(batches, file)).id for _ in range(5)]

    ids = asyncio.run(run())
    assert [batch.id for batch in batches.of("a")] == ids[:1:-1]
    assert sorted(tmp_path.glob("batch_*")) == sorted(tmp_path / f"{id}.json" for id in ids[2:])
    for batch in batches.of("a"):
        batch.created_at -= 61  # as long as files are kept
    assert batches.of("a") == [] and not list(tmp_path.glob("batch_*"))


def test_records_of_batches_are_in_the_quota(tmp_path: Path) -> None:
    """Old ones give way to new ones; where none is left, it is an error."""
    store = store_of(tmp_path, most_bytes=40_000)
    batches = batches_of(store)
    file = requests(store, 1)
    large = {"k": "v" * 12_000}

    def fill() -> None:
        path = store.new_path()
        path.write_bytes(b"x" * store.room("a"))
        store.keep(path, owner="a", filename="large", purpose="batch")

    before = store.room("a")
    first = asyncio.run(ended(batches, file, metadata=large))
    results = store.get("a", first.output_file_id or "").bytes
    assert before - store.room("a") == results + (tmp_path / f"{first.id}.json").stat().st_size
    second, third = (asyncio.run(ended(batches, file, metadata=large)) for _ in range(2))
    assert batches.of("a") == [third, second]
    fill()
    fourth = asyncio.run(ended(batches, file))
    assert batches.of("a") == [fourth]
    fill()
    with pytest.raises(ApiError, match="delete some files") as raised:
        batches.create(state={}, owner="a", file=file, endpoint=TEXT, metadata=None)
    assert raised.value.status == 413 and batches.of("a") == [fourth]  # nothing is let go of in vain
    assert asyncio.run(ended(batches, requests(store, owner="b"))).status == "completed"


@pytest.mark.parametrize("change", [{"later": 1}, {"owner": None}, {"total": "7"}])
def test_a_record_of_another_version_does_not_stop_the_start(tmp_path: Path, change: dict[str, Any]) -> None:
    store = store_of(tmp_path)
    batches = batches_of(store)
    file = requests(store)
    batch = asyncio.run(ended(batches, file))
    for id in (batch.id, file.id):
        path = tmp_path / f"{id}.json"
        path.write_bytes(json.dumps({**json.loads(path.read_bytes()), **change}).encode())
    later = store_of(tmp_path)
    if "total" not in change:
        assert [found.id for found in later.of("a")] == [batch.output_file_id]
    assert batches_of(later).of("a") == []
    assert (tmp_path / f"{batch.id}.json.damaged").exists() and (tmp_path / file.id).exists()


def test_a_file_whose_content_is_gone_is_forgotten(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    file, kept = requests(store), requests(store)
    (tmp_path / file.id).unlink()
    assert store_of(tmp_path).of("a") == [kept]
    assert not (tmp_path / f"{file.id}.json").exists()
