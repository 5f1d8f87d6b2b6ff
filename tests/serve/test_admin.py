"""What operators ask of a running server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig

KEY = "the-key"
TRIES = 50  # a request may end by itself before it is aborted


@pytest.fixture(scope="module")
def guarded(engine_config: EngineConfig, start_server: Any) -> Iterator[Any]:
    server, stop = start_server(engine_config, ServerConfig(port=0, api_key=[KEY]))
    yield server
    stop()


@pytest.fixture
def admin(guarded: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/abort_requests"])
def test_a_key_is_needed(http: httpx.Client, guarded: Any, path: str) -> None:
    assert http.post(path, json={}).json()["error"]["code"] == "key_needed"
    assert httpx.post(guarded.url + path, json={}).status_code == 401


def cached(client: httpx.Client) -> int:
    body = {"prompt": list(range(40, 104)), "max_tokens": 1}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_cached_prefixes_are_forgotten(admin: httpx.Client) -> None:
    cached(admin)
    assert cached(admin) > 0
    assert admin.post("/reset_prefix_cache").status_code == 200
    assert cached(admin) == 0


def aborted(admin: httpx.Client, body: dict[str, Any], headers: dict[str, str]) -> tuple[bool, bool]:
    """Whether two requests, of which the first has the headers, were aborted while they ran."""
    ends: dict[str, bool] = {}
    running = threading.Barrier(3)

    def ask(name: str, **more: Any) -> None:
        fields = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with admin.stream("POST", "/v1/completions", json=fields, **more) as response:
            lines = response.iter_lines()
            next(lines)
            running.wait(60)
            ends[name] = any("aborted" in line for line in lines)

    threads = [
        threading.Thread(target=ask, args=("first",), kwargs={"headers": headers}),
        threading.Thread(target=ask, args=("second",)),
    ]
    for thread in threads:
        thread.start()
    running.wait(60)
    assert admin.post("/abort_requests", json=body).status_code == 200
    for thread in threads:
        thread.join(60)
    return ends["first"], ends["second"]


@pytest.mark.parametrize("id", ["mine", "cmpl-mine"])
def test_a_request_is_aborted_by_its_id(admin: httpx.Client, id: str) -> None:
    for _ in range(TRIES):
        first, second = aborted(admin, {"request_ids": [id]}, {"x-request-id": "mine"})
        assert not second
        if first:
            return
    pytest.fail("it was never aborted")


def test_all_requests_are_aborted(admin: httpx.Client, guarded: Any) -> None:
    assert any(all(aborted(admin, {}, {})) for _ in range(TRIES))
    guarded.wait_idle()


def test_wrong_ids_are_refused(admin: httpx.Client) -> None:
    assert admin.post("/abort_requests", json={"request_ids": "x"}).json()["error"]["param"] == "request_ids"
