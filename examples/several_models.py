"""One server with an embedder, a reranker and a chat model: starts it, finds passages, and has a question answered."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import yaml

from llmjax.config import DEFAULT_MODEL

PASSAGES = [
    "Johann Wolfgang von Goethe worked on his tragedy Faust for about sixty years.",
    "The Eiffel Tower was finished in 1889 and is 330 meters high.",
    "William Shakespeare wrote Hamlet around the year 1600.",
    "Bread rises because yeast makes carbon dioxide.",
]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def settings(arguments: argparse.Namespace) -> dict[str, object]:
    """The server's: the chat model is there from the start on, the others come when they are asked for."""
    return {
        "kv_cache_memory_bytes": "256MiB",
        "access_log": False,
        "models": {
            "chat": {"model": arguments.model, "max_model_len": 1024, "pinned": True},
            "embed": {"model": arguments.embedder, "load": "demand", "keep_alive": "1m"},
            "rank": {"model": arguments.reranker, "load": "demand", "keep_alive": "1m"},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model that answers (default: a small one)")
    parser.add_argument("--embedder", default="sentence-transformers/all-MiniLM-L6-v2", help="model of embeddings")
    parser.add_argument("--reranker", default="BAAI/bge-reranker-base", help="model that judges pairs")
    parser.add_argument("--query", default="Who wrote the play about Doctor Faust?", help="the question")
    arguments = parser.parse_args()

    url = f"http://127.0.0.1:{(port := free_port())}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        file.write_text(yaml.safe_dump(settings(arguments), sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "llmjax", "serve", "--config", str(file), "--port", str(port)]
        server = subprocess.Popen(command, stdout=sys.stderr)  # what we print ourselves stays apart
        try:
            with httpx.Client(base_url=url, timeout=300) as client:
                wait_until_up(client, server)
                answer(client, arguments.query)
        finally:
            server.terminate()
            server.wait()


def answer(client: httpx.Client, query: str) -> None:
    """Prints the passages that fit best, the answer, and which models are loaded then."""

    def post(path: str, **body: object) -> dict[str, list[dict[str, object]]]:
        found: dict[str, list[dict[str, object]]] = client.post(path, json=body).raise_for_status().json()
        return found

    data = post("/v1/embeddings", model="embed", input=[query, *PASSAGES])["data"]
    vectors = np.array([one["embedding"] for one in data])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    near = [PASSAGES[i] for i in np.argsort(-(vectors[1:] @ vectors[0]))[:2]]
    print("found:", *near, sep="\n  ")
    results = post("/v1/rerank", model="rank", query=query, documents=near)["results"]
    best = near[int(str(results[0]["index"]))]
    print("best:", best)
    prompt = f"{best}\nQuestion: {query}\nAnswer:"
    choices = post("/v1/completions", model="chat", prompt=prompt, max_tokens=12, temperature=0)["choices"]
    print("answer:", choices[0]["text"])
    cards = client.get("/v1/models").json()["data"]
    print("models:", ", ".join(f"{card['id']} {card['state']}" for card in cards))


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
