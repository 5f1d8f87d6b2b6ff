"""/v1/files and /v1/batches against openai's own client and types."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch, FileObject
from openai.types.chat import ChatCompletion

from llmjax.config import EngineConfig, ServerConfig
from llmjax.errors import ConfigError
from llmjax.serve.batches.service import Batches
from llmjax.serve.errors import ApiError
from llmjax.serve.files import FileStore
from llmjax.serve.limits import BodyLimits
from tests.waiting import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEYS = ("first-key", "second-key")
MOST_BYTES, MOST_FILE = 200_000, 50_000
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def running(engine_config: EngineConfig, start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    settings = ServerConfig(
        port=0,
        api_key=KEYS,
        files_dir=str(tmp_path_factory.mktemp("files") / "new"),
        max_file_bytes=MOST_FILE,
        max_files_bytes=MOST_BYTES,
        max_request_bytes=20_000,
    )
    server, stop = start_server(dataclasses.replace(engine_config), settings)
    yield server
    stop()


def client_of(running: Any, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=None)


@pytest.fixture
def client(running: Any) -> Iterator[openai.OpenAI]:
    with client_of(running, KEYS[0]) as client:
        yield client


def line(id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": {"max_tokens": 5, "temperature": 0, **body}}


def lines(*requests: dict[str, Any]) -> bytes:
    return "\n".join(map(json.dumps, requests)).encode()


def upload(client: openai.OpenAI, content: bytes) -> FileObject:
    return client.files.create(file=("requests.jsonl", content), purpose="batch")


def begin(client: openai.OpenAI, content: bytes, endpoint: str = TEXT, **more: Any) -> Batch:
    chosen: Any = endpoint
    return client.batches.create(
        input_file_id=upload(client, content).id, endpoint=chosen, completion_window="24h", **more
    )


def ended(client: openai.OpenAI, id: str) -> Batch:
    until(lambda: client.batches.retrieve(id).status in ENDED)
    batch = client.batches.retrieve(id)
    Batch.model_validate(batch.to_dict(), strict=True)
    return batch


def results(client: openai.OpenAI, id: str | None) -> dict[str, Any]:
    assert id is not None
    found = [json.loads(text) for text in client.files.content(id).text.splitlines()]
    return {result["custom_id"]: result for result in found}


def test_a_batch_from_its_file_to_its_results(client: openai.OpenAI) -> None:
    requests = [line(str(i), prompt=[40 + i, 41], max_tokens=1 + i % 5, ignore_eos=True) for i in range(20)]
    begun = begin(client, lines(*requests, line("wrong", prompt="x", temprature=1)), metadata={"a": "b"})
    assert begun.metadata == {"a": "b"} and begun.expires_at == begun.created_at + 24 * 3600
    batch = ended(client, begun.id)
    assert batch.status == "completed" and batch.errors is None
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 21, "completed": 20, "failed": 1}
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    good = results(client, batch.output_file_id)
    assert list(good) == [str(i) for i in range(20)]
    for i in range(20):
        response = good[str(i)]["response"]
        assert response["status_code"] == 200 and response["body"]["usage"]["completion_tokens"] == 1 + i % 5
    bad = results(client, batch.error_file_id)["wrong"]
    assert bad["error"] is None and bad["response"]["status_code"] == 400
    assert "temperature" in bad["response"]["body"]["error"]["message"]
    assert client.files.retrieve(batch.output_file_id or "").purpose == "batch_output"
    assert client.batches.list(limit=1).data[0].id == batch.id


def test_other_endpoints_and_the_key_of_the_requests(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, lines(line("a", CHAT, messages=[{"role": "user", "content": "x"}])), CHAT).id)
    body = results(client, batch.output_file_id)["a"]["response"]["body"]
    ChatCompletion.model_validate(body, strict=True)
    request = line("a", "/v1/responses", input="x", max_output_tokens=3)
    del request["body"]["max_tokens"]
    batch = ended(client, begin(client, lines(request), "/v1/responses").id)
    made = results(client, batch.output_file_id)["a"]["response"]["body"]
    assert client.responses.retrieve(made["id"]).id == made["id"]  # it belongs to the key


@pytest.mark.parametrize(
    ("content", "number", "words"),
    [
        (b"\n\n", None, "no requests"),
        (b"\n{", 2, "valid JSON"),
        (lines(line("a", prompt="x"), line("b", CHAT, messages=[])), 2, "`url`"),
        (lines(line("a", prompt="x"), line("a", prompt="x")), 2, "twice"),
        (lines(line("a", prompt="x" * 30_000)), 1, "larger"),
        (b'{"custom_id": ' + b"[" * 200, 1, "nested"),
        (lines(line("a", prompt="x", stream=True)), 1, "stream"),
        (lines(line("a", input="x", encoding_format="bytes")), 1, "encoding_format"),
    ],
)
def test_a_file_with_a_wrong_line_fails(client: openai.OpenAI, content: bytes, number: int | None, words: str) -> None:
    batch = ended(client, begin(client, content).id)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    (error,) = batch.errors.data
    assert error.line == number and words in (error.message or "")
    assert batch.output_file_id is None


@pytest.fixture
def held(running: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """The engine answers the first request of all, and nothing else; each request that it gets counts."""
    asked = threading.Semaphore(0)
    generate = running.engine.generate
    first = iter([True])

    async def holding(*args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        asked.release()
        if not next(first, False):
            await asyncio.Event().wait()
        async for output in generate(*args, **options):
            yield output

    monkeypatch.setattr(running.engine, "generate", holding)
    return asked


def test_a_batch_is_canceled_and_keeps_what_it_has(client: openai.OpenAI, held: threading.Semaphore) -> None:
    batch = begin(client, lines(*(line(str(i), prompt=[40 + i]) for i in range(9))))
    for _ in range(4):  # three at once, of which one is answered
        held.acquire()
    until(lambda: (counts := client.batches.retrieve(batch.id).request_counts) is not None and counts.completed == 1)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    assert list(results(client, batch.output_file_id)) == ["0"]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_batch_expires(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmjax.serve.batches.service.WINDOW", 0)
    batch = ended(client, begin(client, lines(line("a", prompt="x"))).id)
    assert batch.status == "expired" and batch.expired_at


def test_files_belong_to_a_key_and_have_bounds(running: Any, client: openai.OpenAI) -> None:
    content = lines(line("a", prompt="x"))
    file = upload(client, content)
    FileObject.model_validate(file.to_dict(), strict=True)
    assert (file.filename, file.bytes, file.purpose) == ("requests.jsonl", len(content), "batch")
    assert client.files.content(file.id).content == content
    assert file.id in [found.id for found in client.files.list(purpose="batch", limit=2)]  # goes on to further pages
    with client_of(running, KEYS[1]) as other:
        assert list(other.files.list()) == [] and list(other.batches.list()) == []
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file.id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h")
        with pytest.raises(openai.APIStatusError, match="max-file-bytes") as caught:
            upload(other, b"x" * (MOST_FILE + 100_000))
        assert caught.value.status_code == 413
        kept = [upload(other, b"x" * MOST_FILE) for _ in range(4)]
        with pytest.raises(openai.APIStatusError, match="delete some files"):
            upload(other, b"x")
        assert other.files.delete(kept[0].id).deleted
        upload(other, b"x")
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("send", "status", "words"),
    [
        (lambda http: http.post("/v1/files", json={}), 415, "multipart"),
        (lambda http: http.post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"}), 400, "`file`"),
        (lambda http: http.post("/v1/files", data={"purpose": "x"}, files={"file": b"x"}), 400, "`purpose`"),
        (
            lambda http: http.post(
                "/v1/files",
                data={"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
                files={"file": b"x"},
            ),
            400,
            "expires_after",
        ),
        (
            lambda http: http.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}),
            400,
            "boundary",
        ),
        (
            lambda http: http.post(
                "/v1/files", content=b"junk", headers={"content-type": "multipart/form-data; boundary=b"}
            ),
            400,
            "form",
        ),
        (lambda http: http.get("/v1/files/..%2f..%2fetc%2fpasswd"), 404, ""),
        (lambda http: http.get("/v1/files", params={"limit": "0"}), 400, "limit"),
        (lambda http: http.get("/v1/batches", params={"after": "x"}), 400, "'x'"),
        (lambda http: http.get("/v1/batches/batch_1"), 404, "batch_1"),
        (lambda http: http.post("/v1/batches", json={"input_file_id": "x"}), 400, "required"),
        (
            lambda http: http.post(
                "/v1/batches", json={"input_file_id": "x", "endpoint": "/x", "completion_window": "24h"}
            ),
            400,
            "/v1/embeddings",
        ),
    ],
)
def test_what_is_wrong_is_named(
    running: Any, send: Callable[[httpx.Client], httpx.Response], status: int, words: str
) -> None:
    with httpx.Client(base_url=running.url, timeout=None, headers={"authorization": f"Bearer {KEYS[0]}"}) as http:
        response = send(http)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]


def test_a_later_server_finds_files_and_batches(tmp_path: Path) -> None:
    now = 1000.0
    store = FileStore(tmp_path, most_bytes=2**20, lifetime=60, clock=lambda: now)
    path = store.new_path()
    path.write_bytes(b"abc")
    file = store.keep(path, owner="a", filename="n", purpose="batch")
    store.new_path().write_bytes(b"half")

    async def begun() -> str:
        batches = Batches(store, nobody, limits=BodyLimits(bytes=1000), width=1)
        batch = batches.create(state={}, owner="a", file=file, endpoint=TEXT, metadata=None)
        batch.turn("in_progress")
        batches.save(batch)
        return batch.id

    async def nobody(*_: Any) -> None:
        raise AssertionError

    id = asyncio.run(begun())
    later = FileStore(tmp_path, most_bytes=2**20, lifetime=60, clock=lambda: now)
    assert later.of("a") == [file] and later.of("b") == [] and not list(tmp_path.glob("new-*"))
    batch = Batches(later, nobody, limits=BodyLimits(bytes=1000), width=1).get("a", id)
    assert batch.status == "failed" and batch.errors is not None
    now += 60
    with pytest.raises(ApiError):
        later.get("a", file.id)
    assert not (tmp_path / file.id).exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="files_dir"):
        FileStore(tmp_path / "file" / "x", most_bytes=1, lifetime=1)
