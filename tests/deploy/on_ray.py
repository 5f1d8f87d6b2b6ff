"""Two replicas on Ray Serve, one of which is killed under load, and then another one's engine; or one replica of two
ranks, of which the other one is killed; run as a module by test_ray.py: Ray takes a process.

    python -m tests.deploy.on_ray replicas|ranks MODEL CACHE RESULT

Writes what clients have seen to a file, as JSON: Ray prints.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.util.state import list_actors

from llmjax.deploy.ray import app
from llmjax.engine.ranks.join import free_port

REQUESTS = 40
REPLICA, RANK = "ServeReplica:", "Rank"  # how classes of actors are called
BODY = {"prompt": "the and", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


async def ask(client: httpx.AsyncClient, **fields: Any) -> str:
    """How a request ended: its text, or what went wrong."""
    try:
        if not fields.get("stream"):
            answer = await client.post("/v1/completions", json={**BODY, **fields})
            return answer.json()["choices"][0]["text"] if answer.status_code == 200 else f"status {answer.status_code}"
        text = ""
        async with client.stream("POST", "/v1/completions", json={**BODY, **fields}) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return "error event"
                    text += event["choices"][0]["text"]
        return f"status {answer.status_code}" if answer.status_code != 200 else "cut off"
    except httpx.HTTPError as error:
        return f"lost: {type(error).__name__}"


def alive(kind: str) -> dict[str, int]:
    """Process ids of actors of a class that are alive, by actor."""
    found = list_actors(filters=[("state", "=", "ALIVE")], detail=True)
    return {actor.actor_id: actor.pid for actor in found if actor.class_name.startswith(kind)}


async def until(number: int, kind: str, *, but: str = "") -> None:
    """Waits for a number of actors of a class, while the application serves."""
    limit = time.monotonic() + 240
    while time.monotonic() < limit:
        details = serve.status().applications["default"]
        if details.status == "RUNNING" and len(alive(kind).keys() - {but}) == number:
            return
        await asyncio.sleep(1)
    raise TimeoutError(f"no {number} of {kind}: {serve.status()}")


def engines(pid: int) -> list[int]:
    """Processes of engines that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"llmjax.engine.clients.process_main" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


async def gone(pids: list[int]) -> bool:
    """Whether processes end soon."""
    limit = time.monotonic() + 20
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > limit:
            print("still there:", left, file=sys.stderr)
            return False
        await asyncio.sleep(0.1)
    return True


async def killed(client: httpx.AsyncClient, number: int, kind: str, *, engine: bool) -> dict[str, Any]:
    """What clients see while and after one of several actors of a class is killed, or its engine."""
    victim, pid = next(iter(alive(kind).items()))
    children = engines(pid)
    load = [asyncio.create_task(ask(client, stream=i % 2 == 0, max_tokens=400)) for i in range(REQUESTS)]
    await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)  # the others run or wait
    os.kill(children[0] if engine else pid, signal.SIGKILL)
    ended = await asyncio.wait_for(asyncio.gather(*load), 200)
    counts = collections.Counter("answered" if len(text) > 24 else text for text in ended)
    await until(number, kind, but=victim)
    after = [await ask(client) for _ in range(4)]
    return {"engines": len(children), "ended": counts, "gone": await gone([pid, *children]), "after": after}


async def clients(url: str, number: int, kind: str) -> dict[str, Any]:
    """What clients see before, while and after one of several actors of a class is killed."""
    async with httpx.AsyncClient(base_url=url, timeout=200) as client:
        await until(number, kind)
        found: dict[str, Any] = {"plain": await ask(client), "stream": await ask(client, stream=True)}
        found["health"] = (await client.get("/health")).status_code
        found["killed"] = [await killed(client, number, kind, engine=False)]
        if kind == REPLICA:
            found["killed"].append(await killed(client, number, kind, engine=True))
        return found


def main() -> None:
    what, model, cache, result = sys.argv[1:]
    port = free_port("127.0.0.1")
    ray.init(
        _node_ip_address="127.0.0.1",
        num_cpus=4,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        logging_level="warning",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    arguments = {
        "model": model,
        "num_cpus": "1",
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": "4",
        "max_num_batched_tokens": "32",
        "kv_cache_memory_bytes": "8MiB",
        "compilation_cache_dir": cache,
        **({"num_replicas": "2"} if what == "replicas" else {"nnodes": "2", "tensor_parallel_size": "2"}),
    }
    number, kind = (2, REPLICA) if what == "replicas" else (1, RANK)
    serve.run(app(arguments))
    try:
        Path(result).write_text(json.dumps(asyncio.run(clients(f"http://127.0.0.1:{port}", number, kind))))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
