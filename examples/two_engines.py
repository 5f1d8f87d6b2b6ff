"""Two engines behind one address: starts them, asks many things at once, and shows which engine has answered how many.

The server itself sends each request to the engine that knows most of its beginning, or has least to do.
"""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from llmjax.config import DEFAULT_MODEL

DONE = re.compile(r'vllm:request_success_total\{engine="(\d+)",finished_reason="(?:length|stop)".*\} ([\d.]+)')


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what llmjax serve takes (default: a small one)")
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="requests at once (default: 16)")
    arguments = parser.parse_args()

    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "llmjax", "serve", arguments.model, "--port", str(port)]
    command += ["--data-parallel-size", "2", "--max-model-len", "512", "--no-access-log"]
    server = subprocess.Popen(command, stdout=sys.stderr)  # what we print ourselves stays apart
    try:
        with httpx.Client(base_url=url, timeout=300) as client:
            wait_until_up(client, server)

            def ask(number: int) -> int:
                body = {"prompt": f"Fact number {number} about the sea:", "max_tokens": 16}
                return client.post("/v1/completions", json=body).raise_for_status().json()["usage"]["completion_tokens"]

            with ThreadPoolExecutor(arguments.requests) as pool:
                tokens = sum(pool.map(ask, range(arguments.requests)))
            print(f"{arguments.requests} answers, {tokens} tokens")
            counts: dict[str, float] = {}
            for engine, count in DONE.findall(client.get("/metrics").text):
                counts[engine] = counts.get(engine, 0) + float(count)
            for engine, count in sorted(counts.items()):
                print(f"engine {engine}: {count:.0f} answers")
    finally:
        server.terminate()
        server.wait()


def wait_until_up(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server has ended")


if __name__ == "__main__":
    main()
