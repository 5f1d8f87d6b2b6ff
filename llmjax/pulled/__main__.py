"""Fetches one model, which standard input names; what happens is told on standard output. Ends with standard input, so
that no download outlives its server."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import threading

from filelock import FileLock

from llmjax.checkpoint.download import write_error
from llmjax.errors import LLMJaxError
from llmjax.pulled.check import NotServed
from llmjax.pulled.order import Fetched, Order
from llmjax.pulled.progress import Step
from llmjax.pulled.registry import pull_from_registry

LOCKS = ".locks"


def main() -> int:
    order = Order.of(json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_server, name="end-with-server", daemon=True).start()
    try:
        _write("fetched", fetched(order))
    except LLMJaxError as error:
        _write("failed", {"message": error.message, "hint": error.hint})
    return 0


def fetched(order: Order) -> Fetched:
    """Does what it is told.

    Raises:
        CheckpointError: the model cannot be fetched.
    """

    def tell(step: Step) -> None:
        _write("step", step)

    folder = order.root / order.name.folder
    lock = order.root / LOCKS / f"{'+'.join(order.name.folder.parts)}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(exist_ok=True)
        with FileLock(lock):  # another server may fetch it at the same time
            if order.name.of_hub:
                from llmjax.pulled.hub import pull_from_hub  # with the hub's library

                found = pull_from_hub(order.name, folder, token=order.token, tell=tell)
                return Fetched(model=str(found))
            got = pull_from_registry(order.name, folder, base_url=order.registry, tell=tell)
            return Fetched(model=str(got.path), sampling=got.sampling, ignored=got.ignored)
    except NotServed:
        if not order.known:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        raise write_error(error, folder, 0) from None


def _end_with_server() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _write(kind: str, what: object) -> None:
    data = dataclasses.asdict(what) if dataclasses.is_dataclass(what) and not isinstance(what, type) else what
    sys.stdout.buffer.write(json.dumps([kind, data]).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
