"""A prompt with a picture that one server computes and another goes on with."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llmjax.config import ServerConfig
from llmjax.engine.tiers import offload
from tests.serve.conftest import Running
from tests.serve.pictures import golden, png, seeing, url_of, user
from tests.serve.test_transfer import DECODED_ELSEWHERE

pytestmark = pytest.mark.slow


@pytest.fixture
def servers(
    compile_cache_dir: str, start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Running]]:
    monkeypatch.setattr(offload, "FETCH_SECONDS", 300.0)
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    running, stops = [], []
    for role, port in zip(("kv_producer", "kv_consumer"), ports, strict=True):
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_port": port,
            "kv_peers": [f"127.0.0.1:{ports[0]}"],
            "kv_buffer_size": 2**20,
        }
        config = seeing(compile_cache_dir, master_secret="word", kv_transfer_config=transfer)
        server, stop = start_server(config, ServerConfig(port=0))
        running.append(server)
        stops.append(stop)
    yield running
    for stop in stops:
        stop()


def ask(server: Running, url: str, **options: Any) -> dict[str, Any]:
    body = {"model": "seeing", "messages": user(url), "temperature": 0, **options}
    with server.http() as http:
        response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_picture_is_not_computed_twice(servers: list[Running]) -> None:
    first, second = servers
    url = url_of(png(golden("image2")))
    params = ask(first, url, max_tokens=1, kv_transfer_params=DECODED_ELSEWHERE)["kv_transfer_params"]
    found = ask(second, url, max_tokens=6, kv_transfer_params=params)
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (found["usage"]["prompt_tokens"] - 1) // 8 * 8
    alone = ask(first, url, max_tokens=6)
    assert found["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    # The pages are of that picture: another of its size is computed.
    other = url_of(png(golden("image2")[::-1]))
    params = ask(first, url, max_tokens=1, kv_transfer_params=DECODED_ELSEWHERE)["kv_transfer_params"]
    changed = ask(second, other, max_tokens=6, kv_transfer_params=params)
    assert changed["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"]
    assert changed["usage"]["prompt_tokens_details"]["cached_tokens"] < cached // 2
