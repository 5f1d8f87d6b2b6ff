"""A server on Ray Serve behind its HAProxy against the same server by itself: what the path adds to each token.

    pip install 'llmjax[ray]' 'ray[haproxy]'
    python -m benchmarks.ray_path [--streams 1] [--rounds 3] [--requests 32] [--new-tokens 64]

Both serve the least model there is, with random weights, so that the path is most of what is measured, and are asked in
turn. Medians: from a request to its first token, and all that it takes by its tokens. The lowest of --rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx

from benchmarks.machine import this_machine
from benchmarks.random_model import SHAPES, write_random_model
from llmjax.engine.ranks.join import free_port
from llmjax.errors import ConfigError, LLMJaxError

RAY_MS = 0.3  # that the path adds to a token, at most
START_SECONDS = 300.0
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": "true",
    "max_num_seqs": "32",
    "max_num_batched_tokens": "64",
    "max_model_len": "512",
    "kv_cache_memory_bytes": "16MiB",
    "decode_steps": "1",
}


def main(argv: Sequence[str]) -> int:
    """Measures and prints; the status is 1 if the path adds more than it should.

    Raises:
        LLMJaxError: a setting is wrong, or a server does not start.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_path", allow_abbrev=False)
    parser.add_argument("--streams", type=int, default=1, help="requests at once (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each server (default: 3)")
    parser.add_argument("--requests", type=int, default=32, help="of each measurement (default: 32)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each request (default: 64)")
    options = parser.parse_args(argv)
    for name in ("streams", "rounds", "requests", "new_tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    folder = Path(tempfile.gettempdir()) / "llmjax-ray-path"
    write_random_model(folder, SHAPES["least"], max_position_embeddings=512)
    with alone(folder) as plain, on_ray(folder) as ray:
        rates: dict[str, list[tuple[float, float]]] = {plain: [], ray: []}
        for number in range(options.rounds + 1):
            for url, figures in rates.items():
                figure = asyncio.run(measured(url, options.streams, options.requests, options.new_tokens))
                if number:  # the first round is for what comes up only once
                    figures.append(figure)
    print(f"{options.streams} streams; {this_machine()}")
    best = {}
    for name, url in (("by itself", plain), ("on Ray", ray)):
        first, token = (min(figures) for figures in zip(*rates[url], strict=True))
        best[url] = token
        print(f"{name}: first token after {first:.2f} ms, {token:.3f} ms a token")
    added = best[ray] - best[plain]
    print(f"Ray's path adds {added:+.3f} ms to a token (≤ {RAY_MS})")
    return int(added > RAY_MS)


async def measured(url: str, streams: int, requests: int, new_tokens: int) -> tuple[float, float]:
    """Medians of requests in ms: until the first token, and all of it by its tokens."""
    firsts, tokens = list[float](), list[float]()
    waiting = iter(range(requests))

    async def stream(client: httpx.AsyncClient) -> None:
        for number in waiting:
            body = {
                "prompt": [number % 500 + 1, 2, 3],
                "max_tokens": new_tokens,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            started, came = time.perf_counter(), 0.0
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and not came:
                        came = time.perf_counter()
            firsts.append(1e3 * (came - started))
            tokens.append(1e3 * (time.perf_counter() - started) / new_tokens)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(stream(client) for _ in range(streams)))
    return median(firsts), median(tokens)


@contextmanager
def alone(model: Path) -> Iterator[str]:
    """The server by itself; its URL."""
    port = free_port("127.0.0.1")
    flags = [part for name, value in SETTINGS.items() for part in flag(name, value)]
    command = [sys.executable, "-m", "serve", "--model", str(model), "--port", str(port), *flags]
    with started(command, dict(os.environ), port) as url:
        yield url


@contextmanager
def on_ray(model: Path) -> Iterator[str]:
    """A replica on Ray Serve, whose HAProxy listens; its URL."""
    port = free_port("127.0.0.1")
    arguments = {"model": str(model), "num_cpus": "1", **SETTINGS}
    command = [sys.executable, "-m", "benchmarks.ray_server", str(port), json.dumps(arguments)]
    # Ray's processes give way to all others, here to the client, which elsewhere is on another machine.
    with started(command, os.environ | {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_worker_niceness": "0"}, port) as url:
        yield url


def flag(name: str, value: str) -> list[str]:
    """A setting on the command line."""
    return [f"--{name.replace('_', '-')}", *([] if value == "true" else [value])]


@contextmanager
def started(command: Sequence[str], environment: dict[str, str], port: int) -> Iterator[str]:
    """A server that answers; it ends with the block.

    Raises:
        ConfigError: it does not.
    """
    url, limit = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > limit:
                raise ConfigError(f"{' '.join(command[1:3])} did not start; what it says stands above")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def healthy(url: str) -> bool:
    """Whether a server answers."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"ray_path: error: {error}")
