"""No body, whatever it holds, makes the tokens of another client wait: its stream runs beside each of them."""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from llmjax.serve.limits import MOST_BYTES
from tests.levels import at_levels
from tests.serve.conftest import children

pytestmark = [pytest.mark.real_model, pytest.mark.alone]

T = TypeVar("T")

LIMIT = MOST_BYTES  # what a server with a long context takes by default; this one is told to take as much
CONTEXT = 2048
TIMES = 5  # the median gap: what another client may at most notice,
UNSEEN = 0.04  # seconds, or else no more than this, which nobody sees, however short the other gaps are
TRIES = 4  # the machine may be busy with something else:
ALONE = 2  # then a gap may be this many times the longest of a stream with nothing beside it
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, FILES = "/v1/responses", "/v1/messages", "/v1/files"
BOUNDARY = b"between-the-parts"
TYPES = {FILES: f"multipart/form-data; boundary={BOUNDARY.decode()}"}  # of bodies that are not JSON


def fill(start: bytes, item: bytes, end: bytes) -> bytes:
    """A text of as many items, with commas between them, as fit."""
    count = (LIMIT - len(start) - len(end)) // (len(item) + 1)
    return start + b",".join([item] * count) + end


def numbered(start: bytes, item: bytes, end: bytes, *, count: int) -> bytes:
    """Items that hold their number."""
    return start + b",".join(item % i for i in range(count)) + end


def form(content: bytes, *, field: bytes = b"file", times: int = 1) -> bytes:
    """A form with a file, or with the same field several times."""
    purpose = b'--%b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' % BOUNDARY
    name = b'; filename="lines.jsonl"' if field == b"file" else b""
    part = b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (BOUNDARY, field, name, content)
    return purpose + part * times + b"--%b--\r\n" % BOUNDARY


PROMPT = b'{"prompt": "x", "max_tokens": 1, '
USER = b'{"messages": [{"role": "user", "content": '
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "bad words": (
        TEXT,
        lambda: PROMPT + b'"bad_words": [' + b",".join([b'"' + b"w " * 25_000 + b'"'] * 128) + b"]}",
    ),
    "stop strings": (TEXT, lambda: PROMPT + b'"stop": [' + b",".join([b'"' + b"w " * 5 * 10**4 + b'"'] * 64) + b"]}"),
    "prompts": (TEXT, lambda: fill(b'{"prompt": [', b"[1]", b"]}")),
    "long texts": (TEXT, lambda: fill(b'{"prompt": [', b'"' + b"the quick " * 10**5 + b'"', b"]}")),
    "text": (TEXT, lambda: b'{"prompt": "' + b"a b c d " * (LIMIT // 8 - 10) + b'"}'),
    "text that is cut": (
        TEXT,
        lambda: PROMPT[:-2] + b', "truncate_prompt_tokens": 5, "user": "' + b"u" * (LIMIT - 1000) + b'"}',
    ),
    "text to tokenize": ("/tokenize", lambda: b'{"prompt": "' + b"a b c d " * (LIMIT // 8 - 10) + b'"}'),
    "tokens": ("/detokenize", lambda: fill(b'{"tokens": [', b"1", b"]}")),
    "unknown keys": (TEXT, lambda: numbered(PROMPT, b'"unknown key %d": 1', b"}", count=350_000)),
    "unknown key": (TEXT, lambda: PROMPT + b'"' + b"k" * (LIMIT - 100) + b'": 1}'),
    "messages": (CHAT, lambda: fill(b'{"messages": [', b'{"role": "user", "content": "x"}', b"]}")),
    "text parts": (CHAT, lambda: fill(USER + b"[", b'{"type": "text", "text": "x"}', b"]}]}")),
    "wrong parts": (CHAT, lambda: USER + b"[" + b",".join([b"1"] * 250_000) + b"]}]}"),
    "message fields": (CHAT, lambda: numbered(USER + b'"x", ', b'"k%d": 1', b"}]}", count=500_000)),
    "logit_bias": (TEXT, lambda: numbered(PROMPT + b'"logit_bias": {', b'"%d": 1', b"}}", count=500_000)),
    "allowed_token_ids": (TEXT, lambda: fill(PROMPT + b'"allowed_token_ids": [', b"7", b"]}")),
    "metadata": (CHAT, lambda: numbered(USER + b'"x"}], "metadata": {', b'"%d": "a"', b"}}", count=500_000)),
    "schema": (CHAT, lambda: fill(USER + b'"x"}], "tools": [', b'{"a": {"b": []}}', b"]}")),
    "model name": (TEXT, lambda: PROMPT + b'"model": "' + b"m" * (LIMIT - 100) + b'"}'),
    "tool schemas": (
        CHAT,
        lambda: (
            USER
            + b'"x"}], "max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"p": ['
            + b",".join([b'{"a": []}'] * 9_000)
            + b"]}}}]}"
        ),
    ),
    "tools": (
        CHAT,
        lambda: fill(USER + b'"x"}], "tools": [', b'{"type": "function", "function": {"name": "f"}}', b"]}"),
    ),
    "response items": (RESPONSES, lambda: fill(b'{"input": [', b'{"role": "user", "content": "x"}', b"]}")),
    "response parts": (
        RESPONSES,
        lambda: fill(b'{"input": [{"role": "user", "content": [', b'{"type": "input_text", "text": "x"}', b"]}]}"),
    ),
    "referred items": (RESPONSES, lambda: fill(b'{"input": [', b'{"type": "item_reference", "id": "x"}', b"]}")),
    "response text": (RESPONSES, lambda: b'{"input": "' + b"a b c d " * (LIMIT // 8 - 10) + b'"}'),
    "message blocks": (
        MESSAGES,
        lambda: fill(
            b'{"max_tokens": 1, "messages": [{"role": "user", "content": [', b'{"type": "text", "text": "x"}', b"]}]}"
        ),
    ),
    "message text": (
        MESSAGES,
        lambda: (
            b'{"max_tokens": 1, "messages": [{"role": "user", "content": "' + b"a b c d " * (LIMIT // 8 - 20) + b'"}]}'
        ),
    ),
    "texts to embed": ("/v1/embeddings", lambda: fill(b'{"input": [', b'"x"', b"]}")),
    "tokens to embed": ("/v1/embeddings", lambda: fill(b'{"input": [', b"[1]", b"]}")),
    "documents": ("/rerank", lambda: fill(b'{"query": "x", "documents": [', b'"x"', b"]}")),
    "pairs": ("/score", lambda: fill(b'{"text_1": "x", "text_2": [', b'"x"', b"]}")),
    "batch metadata": (
        "/v1/batches",
        lambda: numbered(b'{"input_file_id": "x", "metadata": {', b'"%d": "a"', b"}}", count=500_000),
    ),
    "file": (FILES, lambda: form(b'{"custom_id": "a"}\n' * ((LIMIT - 1000) // 19))),
    "file with what is nearly its end": (FILES, lambda: form((b"\r\n--" + BOUNDARY[:-1]) * ((LIMIT - 1000) // 20))),
    "file of line ends": (FILES, lambda: form(b"\r\n" * ((LIMIT - 1000) // 2))),
    "long field": (FILES, lambda: form(b"x" * (LIMIT - 1000), field=b"purpose")),
    "fields": (FILES, lambda: form(b"", field=b"f", times=(LIMIT - 1000) // 70)),
    # Within the limits: these are taken.
    "many allowed_token_ids": (TEXT, lambda: numbered(PROMPT + b'"allowed_token_ids": [', b"%d", b"]}", count=49_000)),
    "many biases": (TEXT, lambda: numbered(PROMPT + b'"logit_bias": {', b'"%d": 1', b"}}", count=10_000)),
    "wrong biases": (TEXT, lambda: numbered(PROMPT + b'"logit_bias": {', b'"%d": "a"', b"}}", count=30_000)),
    "many parts": (CHAT, lambda: USER + b"[" + b",".join([b'{"type": "text", "text": "x"}'] * 9_000) + b"]}]}"),
}


def wait_idle(pid: int) -> None:
    """Until a server has compiled all its programs: what a stream feels of that is not what is tested here."""
    used, quiet = 0.0, 0
    for _ in range(300):
        time.sleep(1)
        before, used = used, sum(map(cpu_seconds, [pid, *children(pid)]))
        quiet = quiet + 1 if used - before < 0.05 else 0
        if quiet == 3:
            return
    pytest.fail("the server is still busy with itself")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken: user and system, proc(5)."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def url(smollm2_path: Path, compile_cache_dir: str) -> Iterator[str]:
    """A server in its own process: what the test itself does must not hold it up."""
    command = [sys.executable, "-m", "serve", "--port", "0", "--model", str(smollm2_path)]
    command += ["--max-request-bytes", str(LIMIT), "--max-model-len", str(CONTEXT), "--max-num-seqs", "2"]
    command += ["--max-num-batched-tokens", "32", "--decode-steps", "1", "--kv-cache-memory-bytes", "256MiB"]
    command += ["--compilation-cache-dir", compile_cache_dir, "--disable-log-stats"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    seen: list[str] = []
    try:
        for line in server.stdout:
            seen.append(line)
            if found := re.search(r"is served at (http://127\.0\.0\.1:\d+)/v1", line):
                break
        else:
            pytest.fail("the server did not start:\n" + "".join(seen))
        threading.Thread(target=server.stdout.read, daemon=True).start()
        wait_idle(server.pid)
        yield found[1]
    finally:
        server.kill()
        server.wait()


def gaps_beside(url: str, send: Callable[[], T]) -> tuple[list[float], T]:
    """Seconds between the chunks of a stream before, while and after something is sent and answered; the answer."""
    times: list[float] = []
    done = threading.Event()

    def listen() -> None:
        fields = {"prompt": [40, 41], "max_tokens": CONTEXT - 8, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url + TEXT, json=fields, timeout=None) as response:
            assert response.status_code == 200, response.read()
            for _ in response.iter_raw():
                times.append(time.perf_counter())
                if done.is_set():
                    return

    def wait_for(count: int) -> None:
        while len(times) < count and listener.is_alive():
            time.sleep(0.01)

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        wait_for(30)
        answer = send()
        wait_for(len(times) + 30)
    finally:
        done.set()
        listener.join()
    return [b - a for a, b in itertools.pairwise(times)][5:], answer


# Each way to read a body, and what takes longest in it.
SOME = [
    *("bad words", "text", "prompts", "messages", "message fields", "schema", "response items", "message text"),
    *("texts to embed", "pairs", "file with what is nearly its end", "fields", "many biases", "many parts"),
]


@pytest.mark.parametrize("name", at_levels(BODIES, slow=SOME))
def test_a_stream_does_not_wait(url: str, name: str) -> None:
    path, build = BODIES[name]
    body, kind = build(), TYPES.get(path, "application/json")
    assert len(body) <= LIMIT

    def send() -> httpx.Response:
        return httpx.post(url + path, content=body, headers={"content-type": kind}, timeout=None)

    longest = alone = 0.0
    for _ in range(TRIES):
        began = time.monotonic()
        gaps, response = gaps_beside(url, send)
        seconds = time.monotonic() - began
        assert response.status_code in (200, 400, 404), response.text[:300]
        assert len(gaps) > 50 and len(response.content) < 10_000
        longest = max(gaps)
        if longest < max(TIMES * statistics.median(gaps), UNSEEN, ALONE * alone):
            return
        alone = max(alone, *gaps_beside(url, lambda seconds=seconds: time.sleep(seconds))[0])
    pytest.fail(f"the longest gap was {longest * 1e3:.0f} ms, with nothing beside the stream {alone * 1e3:.0f} ms")
