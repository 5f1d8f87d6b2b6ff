"""One engine in its own process, asked by JSON lines: ``python -m benchmarks.engines.worker NAME``.

The first line on standard input is the ``EngineOptions``; its reply comes when the model is loaded. Each further line
is ``{"warm_up": true}`` or ``{"prompts": [[id, …], …], "new_tokens": n}``; the end of input ends the process. A reply
is one line of JSON, ``{"error": text}`` if the request failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

from benchmarks.engines.interface import Engine, EngineOptions, adapter


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Does what a line asks for; the time is that of the engine's call alone."""
    if request.get("warm_up"):
        engine.warm_up()
        return {}
    start = time.perf_counter()
    tokens = engine.generate(request["prompts"], request["new_tokens"])
    seconds = time.perf_counter() - start
    if [len(ids) for ids in tokens] != [request["new_tokens"]] * len(request["prompts"]):
        raise RuntimeError(f"asked for {request['new_tokens']} tokens each, got {[len(ids) for ids in tokens]}")
    return {"seconds": seconds, "tokens": tokens}


def main(name: str) -> int:
    # Engines print as they like: what they print goes to standard error, the replies to what was standard output.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        try:
            if engine is None:
                engine = adapter(name)(EngineOptions(**json.loads(line)))
                reply: dict[str, Any] = {"details": {"python": sys.version.split()[0], **engine.details()}}
            else:
                reply = answer(engine, json.loads(line))
        except Exception as error:  # whatever an engine raises is the answer; the log has its traceback
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(reply), file=replies, flush=True)
    if engine is not None:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
