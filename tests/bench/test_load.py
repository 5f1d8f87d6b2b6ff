"""The HTTP client and the load of ``bench serve``, against a server on loopback that answers by a script."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.bench.dataset import Sample
from llmjax.bench.load import Target, run_load, send
from llmjax.bench.metrics import RequestRecord
from llmjax.bench.scrape import parse_work
from llmjax.bench.serve import parse
from llmjax.cli import main
from llmjax.errors import ConfigError
from tests import virtual_time

GAP = 0.03  # seconds between two tokens of the scripted server


class Script(BaseHTTPRequestHandler):
    """Streams ``max_tokens`` tokens; odd prompts ask for odd behavior."""

    protocol_version = "HTTP/1.0"
    active = most_active = steps = 0
    lock = threading.Lock()
    bodies: list[dict[str, Any]]
    sent: list[float]  # when each token left
    keys: set[str | None]  # what requests had for Authorization
    together: threading.Barrier  # where prompts "together" wait for each other

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        Script.keys.add(self.headers["Authorization"])
        pages = {
            "/health": "",
            "/v1/models": '{"data": [{"id": "scripted"}]}',
            "/metrics": f"llmjax:steps_total {Script.steps}\nllmjax:step_host_seconds_total {Script.steps / 500}\n"
            f"llmjax:compilations_total {min(len(Script.bodies), 2)}\n",  # the first two requests had to wait for one
        }
        self._reply(200 if self.path in pages else 404, pages.get(self.path, "nothing here"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Script.keys.add(self.headers["Authorization"])
        Script.bodies.append(body)
        prompt = body.get("prompt")
        if self.path == "/tokenize":
            return self._reply(200, json.dumps({"count": len(prompt.split())}))
        if prompt == "refuse":
            return self._reply(400, '{"error": {"message": "max_tokens is too large"}}')
        with Script.lock:
            Script.active += 1
            Script.most_active = max(Script.active, Script.most_active)
        self.send_response(200)
        self.end_headers()
        self._line(": keep-alive")
        if prompt == "together":
            Script.together.wait()
        for i in range(body["max_tokens"]):
            time.sleep(GAP)
            Script.steps += 1
            Script.sent.append(time.monotonic())
            text = {"text": f" t{i}"} if "prompt" in body else {"delta": {"content": f" t{i}"}}
            self._event({"choices": [text]})
        with Script.lock:
            Script.active -= 1
        if prompt == "break":
            return None
        if prompt == "fail":
            return self._event({"error": {"message": "the engine died"}})
        self._event({"choices": [{"text": "", "finish_reason": "length"}]})
        if prompt != "uncounted":
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}})
        return self._line("data: [DONE]")

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def _event(self, event: dict[str, Any]) -> None:
        self._line(f"data: {json.dumps(event)}")

    def _line(self, line: str) -> None:
        self.wfile.write(f"{line}\n\n".encode())


@pytest.fixture
def url() -> Iterator[str]:
    Script.active = Script.most_active = Script.steps = 0
    Script.bodies, Script.sent, Script.keys = [], [], set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def sent(url: str, prompt: str, *, backend: str = "openai", tokens: int = 4) -> RequestRecord:
    async def run() -> RequestRecord:
        client = OpenAIClient(url, api_key="secret")
        try:
            target = Target(client=client, backend=backend, model="scripted", fields={"temperature": 0.0})
            return await send(target, Sample(prompt, tokens))
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_times_of_a_stream(url: str, backend: str) -> None:
    record = sent(url, "hi", backend=backend)
    assert record.error is None
    assert record.text == " t0 t1 t2 t3"
    assert (record.prompt_tokens, record.output_tokens, len(record.chunk_times)) == (7, 4, 4)
    assert all(sent <= seen <= record.end for sent, seen in zip(Script.sent, record.chunk_times, strict=True))
    assert record.chunk_times == sorted(record.chunk_times)
    assert record.ttft == record.chunk_times[0] - record.start and record.ttft >= GAP
    assert record.tpot == pytest.approx((record.end - record.chunk_times[0]) / 3)
    body = Script.bodies[0]
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (4, 0.0, True)
    assert body["stream_options"] == {"include_usage": True}
    assert ("messages" in body) == (backend == "openai-chat")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("refuse", "400 Bad Request: max_tokens is too large"),
        ("break", "the stream ended early, without [DONE]"),
        ("fail", "the engine died"),
        ("uncounted", "the stream has no usage"),
    ],
)
def test_failures_are_part_of_the_record(url: str, prompt: str, message: str) -> None:
    record = sent(url, prompt)
    assert record.error is not None
    assert message in record.error


def test_no_server() -> None:
    record = sent("http://127.0.0.1:9", "hi")
    assert record.error is not None
    assert record.error.startswith("http://127.0.0.1:9/v1/completions: ")


def loaded(url: str, arrivals: list[float], *, max_concurrency: int | None = None) -> list[RequestRecord]:
    async def run() -> list[RequestRecord]:
        client = OpenAIClient(f"{url}/v1/")
        target = Target(client=client, backend="openai", model="scripted", fields={})
        samples = [Sample("together", 2)] * len(arrivals)
        records = await run_load(target, samples, arrivals, max_concurrency=max_concurrency)
        await client.close()
        return records

    return asyncio.run(run())


def test_concurrency_is_limited(url: str) -> None:
    Script.together = threading.Barrier(2)
    records = loaded(url, [0.0] * 6, max_concurrency=2)
    assert [record.error for record in records] == [None] * 6
    assert Script.most_active == 2
    for record in records:  # waiting for the gate is not counted: two at a time, and itself
        assert sum(other.start <= record.start < other.end for other in records) <= 2


ANSWER_SECONDS = 10.0


async def slow_server(scope: Any, receive: Any, send: Any) -> None:
    """An application whose every answer takes as long."""
    await asyncio.sleep(ANSWER_SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    body = f'data: {{"choices": [{{"text": "a"}}]}}\n\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n'
    await send({"type": "http.response.body", "body": body.encode()})


@pytest.mark.parametrize(
    ("max_concurrency", "starts"),
    [(None, [0.0, 0.5, 2.0, 11.0]), (2, [0.0, 0.5, 10.0, 11.0]), (1, [0.0, 10.0, 20.0, 30.0])],
)
def test_requests_leave_at_their_times_whatever_becomes_of_others(
    max_concurrency: int | None, starts: list[float]
) -> None:
    arrivals = [0.0, 0.5, 2.0, 11.0]

    async def run() -> list[RequestRecord]:
        client = OpenAIClient("http://slow")
        client._http = httpx.AsyncClient(transport=httpx.ASGITransport(slow_server), base_url=client.url)
        target = Target(client=client, backend="openai", model="slow", fields={})
        return await run_load(target, [Sample("hi", 1)] * 4, arrivals, max_concurrency=max_concurrency)

    records = virtual_time.run(run())  # whose clock starts at 0
    assert [record.error for record in records] == [None] * 4
    assert [record.start for record in records] == pytest.approx(starts)
    assert [record.end for record in records] == pytest.approx([start + ANSWER_SECONDS for start in starts])
    waited = [start - arrival for start, arrival in zip(starts, arrivals, strict=True)]
    assert [record.queued for record in records] == pytest.approx(waited)


def test_the_whole_benchmark(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmjax.bench.serve.QUIET_SECONDS", 1e-9)
    result = tmp_path / "result.json"
    line = f"bench serve --base-url {url} --num-prompts 5 --num-warmups 1 --input-len 6 --output-len 3 --ignore-eos"
    assert main([*line.split(), "--output-json", str(result), "--metric-percentiles", "50,99", "--save-detailed"]) == 0
    fields = json.loads(result.read_text())
    assert (fields["completed"], fields["failed"], fields["model"]) == (5, 0, "scripted")
    assert (fields["total_input_tokens"], fields["total_output_tokens"]) == (35, 15)
    assert fields["output_lens"] == [3] * 5
    assert (fields["steps"], fields["compilations"]) == (15, 0)  # those of the warm-up are not in it
    assert fields["host_ms_per_step"] == pytest.approx(2.0)
    assert fields["mean_itl_ms"] > 0
    assert fields["p50_ttft_ms"] == fields["median_ttft_ms"]
    assert fields["request_rate"] == "inf"
    assert "api_key" not in fields
    assert len(Script.bodies) == 8  # in three rounds of warming up the last one has seen no compilation
    assert {len(body["prompt"]) for body in Script.bodies} == {6}
    assert all(body["ignore_eos"] for body in Script.bodies)
    shown = capsys.readouterr().out
    assert "time to first token (TTFT), ms" in shown
    assert "host time, ms per step" in shown


@pytest.mark.parametrize(
    ("variable", "flags", "sent"),
    [
        (None, [], None),
        ("", [], None),
        ("of-all", [], "Bearer of-all"),
        ("of-all", ["--api-key", "own"], "Bearer own"),
        ("of-all", ["--header", "authorization=Basic abc"], "Basic abc"),
        ("of-all", ["--header", "X-Team=a"], "Bearer of-all"),
    ],
)
def test_the_key_is_that_of_the_environment_unless_one_is_given(
    url: str,
    tmp_path: Path,
    variable: str | None,
    flags: list[str],
    sent: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("OPENAI_API_KEY", variable)
    result = tmp_path / "result.json"
    line = f"bench serve --base-url {url} --num-prompts 1 --num-warmups 0 --input-len 6 --output-len 1"
    assert main([*line.split(), "--output-json", str(result), *flags]) == 0
    assert Script.keys == {sent} and "of-all" not in result.read_text()


def test_sharegpt_texts_are_counted_by_the_server(url: str, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a b c d"}, {"from": "gpt", "value": "e f g h i"}]
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"conversations": turns}]))
    line = f"bench serve --base-url {url} --dataset-name sharegpt --dataset-path {path} --num-prompts 2"
    assert main([*line.split(), "--num-warmups", "0", "--backend", "openai-chat"]) == 0
    asked = [body for body in Script.bodies if "messages" in body]
    assert [body["max_tokens"] for body in asked] == [5, 5]
    assert asked[0]["messages"] == [{"role": "user", "content": "a b c d"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--base-url x --port 1", "the server is --base-url, or --host and --port: not both"),
        ("--base-url x --page-size 16", "--page-size has no effect on the server that is measured"),
        ("--port 1 --config smollm2", "--config has no effect on the server that is measured"),
        ("--request-rate 0", "--request-rate must be above 0"),
        ("--header a", "--header must be KEY=VALUE, not 'a'"),
        ("--dataset-name custom", "--dataset-path goes with --dataset-name custom, sharegpt"),
        ("--metric-percentiles 101", "--metric-percentiles: 101 does not lie in [0, 100]"),
        ("--num-prompts 0", "--num-prompts must be at least 1, not 0"),
        ("--max-tokens 3", "unknown flag --max-tokens"),
    ],
)
def test_wrong_options(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(line.split())
    assert str(error.value).startswith(message)


def test_chat_takes_no_token_ids() -> None:
    client = OpenAIClient("localhost:1")
    target = Target(client=client, backend="openai-chat", model="m", fields={})
    with pytest.raises(ConfigError, match="takes texts"):
        target.payload(Sample([1, 2], 3))


def test_urls() -> None:
    assert [OpenAIClient(url).url for url in ("h:1", "http://h:1/v1/", "https://h/v1")] == [
        "http://h:1",
        "http://h:1",
        "https://h",
    ]
    for url in ("http://a:b", "ftp://a", "http://", "http://a:99999", "http://a:-1"):
        with pytest.raises(RequestFailed, match="is not a URL"):
            OpenAIClient(url)


def test_counters_of_another_server() -> None:
    assert parse_work("vllm:steps_total 3\n") is None
    assert parse_work("<html>") is None
    page = 'llmjax:steps_total{engine="0"} 4\nllmjax:step_host_seconds_total 0.5\nllmjax:compilations_total 1\n'
    work = parse_work(page)
    assert work is not None
    assert (work.steps, work.host_ms_per_step, work.compilations) == (4, 125.0, 1)


def test_a_result_that_could_not_be_written_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--output-json", "/nowhere/x.json"]) == 1
    assert capsys.readouterr().err == "llmjax: error: --output-json: no folder /nowhere\n"


def test_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]) == 1
    assert capsys.readouterr().err.startswith(
        "llmjax: error: the server is not ready after 0 s: http://127.0.0.1:9 cannot be reached: "
    )
