"""A client that goes away frees everything it held, whenever it goes."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import select
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.waiting import until

# Takes seconds, if nobody ends it: what comes first does not depend on which thread gets the processor first.
LONG: dict[str, Any] = {"prompt": [40, 41, 42], "max_tokens": 480, "n": 32, "ignore_eos": True, "temperature": 0}


def generated(running: Any) -> float:
    """Tokens that the engine has made for anybody."""
    with running.http() as http:
        line = re.search(r"^vllm:generation_tokens_total\S* (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert line is not None
    return float(line[1])


def test_dropped_stream(running: Any, http: httpx.Client) -> None:
    running.wait_idle()
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        with running.paused():
            assert running.engine.num_requests == 1
            response.close()
            running.wait_idle()


def hang_up(running: Any, body: dict[str, Any], *, patient: bool, name: str = "left") -> None:
    """Sends a request and leaves: at once, or as soon as the engine has it; nothing of the answer has been read."""
    content = json.dumps({**LONG, **body}).encode()
    url = httpx.URL(running.url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    head += f"X-Request-Id: {name}\r\n"
    with socket.create_connection((url.host, url.port or 0)) as sock:
        sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        while patient and not running.engine.num_requests:
            if select.select([sock], [], [], 0.001)[0]:
                assert sock.recv(64, socket.MSG_PEEK).startswith(b"HTTP/1.1 200"), "refused"


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"prompt": [[40], [41]], "n": 16}])
def test_client_that_hangs_up(running: Any, body: dict[str, Any]) -> None:
    for patient in (False, True):
        before = generated(running)
        hang_up(running, body, patient=patient)
        running.wait_idle()
        assert generated(running) - before < LONG["n"] * LONG["max_tokens"], "the request ran on for nobody"


def test_log_names_clients_that_left(running: Any, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    names = ("unread", "half-read")  # other requests' lines may come late

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(record.getMessage()) for record in caplog.records if record.name == "llmjax.serve.access"]
        return [line for line in found if line["request_id"] in names]

    running.wait_idle()
    with caplog.at_level(logging.INFO, logger="llmjax.serve.access"):
        hang_up(running, {}, patient=True, name=names[0])
        until(lambda: len(lines()) == 1)
        headers = {"X-Request-Id": names[1]}
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers=headers) as response:
            next(response.iter_lines())
        until(lambda: len(lines()) == 2)
    running.wait_idle()
    assert [line["status"] for line in lines()] == [499, 200]
    assert all("client" in line["error"] for line in lines())
    assert lines()[1]["completion_tokens"] < LONG["n"] * LONG["max_tokens"]


def test_half_of_many_streams_dropped(running: Any) -> None:
    """32 streams, every second one dropped after a few chunks; the others are whole and all pages come back."""
    body: dict[str, Any] = {
        "model": "tiny-llama",
        "temperature": 0,
        "max_tokens": 40,
        "extra_body": {"ignore_eos": True},
    }

    async def stream(client: openai.AsyncOpenAI, index: int) -> int:
        chunks = await client.completions.create(prompt=[40 + index] * (3 + index), stream=True, **body)
        count = 0
        async for chunk in chunks:
            if chunk.choices[0].finish_reason:
                return 40
            count += 1
            if index % 2 and count == 5:
                await chunks.close()
                return -1
        return count

    async def main() -> list[int]:
        async with openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=None
        ) as client:
            return await asyncio.gather(*(stream(client, index) for index in range(32)))

    results = asyncio.run(main())
    assert results == [-1 if index % 2 else 40 for index in range(32)]
    running.wait_idle()
    stats = running.engine.kv_stats()
    assert stats.used == 0 and stats.free + stats.cached == stats.total


def test_engine_serves_on_after_all_that(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**LONG, "max_tokens": 3, "n": 1}).json()
    assert answer["usage"]["completion_tokens"] == 3
