"""Pulls a model in a process of its own, which can be ended at any time without a trace but for what has come."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress

from llmjax.errors import CheckpointError
from llmjax.pulled.order import Fetched, Order
from llmjax.pulled.progress import Step
from llmjax.system import python_path

LINE = 2**20  # bytes that it may say at once


async def fetched(order: Order) -> AsyncGenerator[Step | Fetched, None]:
    """What a pull does, step by step, and last what has come of it. Closing it ends the process; what has been
    downloaded by then stays, and the next pull of the name goes on with it as far as its host allows.

    Raises:
        CheckpointError: the model cannot be fetched.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "llmjax.pulled"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path()},
        start_new_session=True,  # Ctrl-C is the server's affair
        limit=LINE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(order.data()).encode() + b"\n")
        async for line in process.stdout:
            kind, data = json.loads(line)
            if kind == "failed":
                raise CheckpointError(data["message"], hint=data["hint"])
            if kind == "fetched":
                yield Fetched(**{**data, "ignored": tuple(data["ignored"])})
                return
            yield Step(**data)
        status = await process.wait()
        raise CheckpointError(f"the process that fetched {order.name.source} has ended, with status {status}")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
