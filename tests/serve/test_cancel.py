"""A client that goes away frees everything it held, whenever it goes."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
from typing import Any

import httpx
import openai
import pytest

LONG: dict[str, Any] = {"prompt": [40, 41, 42], "max_tokens": 480, "ignore_eos": True, "temperature": 0}


def generated(running: Any) -> float:
    """Tokens that the engine has made for anybody."""
    with running.http() as http:
        line = re.search(r"^vllm:generation_tokens_total\S* (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert line is not None
    return float(line[1])


def test_dropped_stream(running: Any, http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert running.engine.num_requests == 1
    running.wait_idle()


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}, {"prompt": [[40], [41]]}])
def test_client_that_hangs_up(running: Any, body: dict[str, Any]) -> None:
    """At once, or as soon as the engine has the request; nothing of the answer has been read."""
    content = json.dumps({**LONG, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    for patient in (False, True):
        before = generated(running)
        with socket.create_connection((httpx.URL(running.url).host, httpx.URL(running.url).port or 0)) as sock:
            sock.sendall(head.encode() + b"\r\n\r\n" + content)
            while patient and not running.engine.num_requests:
                time.sleep(0.001)
        running.wait_idle()
        choices = len(body.get("prompt", [0])) * body.get("n", 1)
        assert generated(running) - before < choices * LONG["max_tokens"], "the request ran on for nobody"


def test_log_names_clients_that_left(running: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="llmjax.serve.access"):
        for stream in (False, True):
            with httpx.Client(base_url=running.url, timeout=0.3) as impatient, pytest.raises(httpx.TimeoutException):
                if stream:
                    with impatient.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                        assert response.status_code == 200
                        raise httpx.ReadTimeout("enough")
                impatient.post("/v1/completions", json={**LONG, "n": 4})
        running.wait_idle()
        time.sleep(0.1)
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "llmjax.serve.access"]
    assert [line["status"] for line in lines] == [499, 200]
    assert all("client" in line["error"] for line in lines)
    assert lines[1]["completion_tokens"] < 480


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
            base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(stream(client, index) for index in range(32)))

    results = asyncio.run(main())
    assert results == [-1 if index % 2 else 40 for index in range(32)]
    running.wait_idle()
    stats = running.engine.kv_stats()
    assert stats.used == 0 and stats.free + stats.cached == stats.total


def test_engine_serves_on_after_all_that(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**LONG, "max_tokens": 3}).json()
    assert answer["usage"]["completion_tokens"] == 3
