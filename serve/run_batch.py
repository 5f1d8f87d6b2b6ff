"""Answers a file of requests without a server: ``llmjax run-batch``."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from starlette.applications import Starlette

from llmjax.config import EngineConfig, ServerConfig
from llmjax.errors import ConfigError
from llmjax.progress import progress_bar
from llmjax.serve.answers import OutputFormats
from llmjax.serve.batches.answering import AHEAD, answers
from llmjax.serve.batches.inner import Answer, ask
from llmjax.serve.batches.lines import BadLine, BatchLine, read_lines, result_line
from llmjax.serve.limits import MOST_BYTES, BodyLimits

if TYPE_CHECKING:
    from llmjax import AsyncLLM
    from llmjax.serve.mcp.servers import ToolServers

WIDTH = 2  # times as many requests as run at once are asked, so that one waits for every place that gets free


@dataclass(frozen=True)
class Counts:
    """How the requests of a batch went."""

    completed: int
    failed: int


def run_batch(engine_config: EngineConfig, server_config: ServerConfig, source: Path, target: Path) -> Counts:
    """Reads requests from ``source`` and writes results to ``target``, line for line, in vLLM's format.

    Until the last result there is only ``target`` with ``.partial`` at the end of its name.

    Raises:
        ConfigError: a file cannot be read or written, or a line is not a request; before the model is loaded.
        LLMJaxError: the model cannot be loaded.
    """
    config = replace(
        server_config, access_log=False, api_key=(), admin_key=(), cache_salt_per_key=None, request_timeout=None
    )
    OutputFormats(None, config)  # says so if there is no parser of a name
    total = _count(source, BodyLimits(bytes=config.max_request_bytes or MOST_BYTES))
    partial = target.with_name(target.name + ".partial")
    with _open(source, "rb") as requests, _open(partial, "wb") as results, asyncio.Runner() as runner:
        counts = runner.run(_run(engine_config, config, requests, results, total=total))
    os.replace(partial, target)
    return counts


def _count(source: Path, limits: BodyLimits) -> int:
    """How many requests there are, all of them good."""
    with _open(source, "rb") as requests:
        try:
            total = sum(1 for _ in read_lines(requests, limits))
        except BadLine as error:
            raise ConfigError(f"{source}, {error}") from None
    if not total:
        raise ConfigError(f"{source} holds no requests")
    return total


def _open(path: Path, mode: Literal["rb", "wb"]) -> BinaryIO:
    try:
        return path.open(mode)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


async def _run(
    engine_config: EngineConfig, config: ServerConfig, requests: BinaryIO, results: BinaryIO, *, total: int
) -> Counts:
    from llmjax import AsyncLLM  # the requests are known to be good before the model is loaded
    from llmjax.serve.app import create_app

    engine: AsyncLLM = AsyncLLM.from_config(engine_config)
    try:
        await engine.wait_ready()
        app = create_app(engine, config)
        tools: ToolServers = app.state.shared.tool_servers
        await tools.start()
        try:
            return await _answer(app, engine, requests, results, total=total)
        finally:
            await tools.close()
    finally:
        await engine.shutdown(drain_timeout=0)


async def _answer(app: Starlette, engine: AsyncLLM, requests: BinaryIO, results: BinaryIO, *, total: int) -> Counts:
    limits: BodyLimits = app.state.shared.limits
    failed = done = 0

    async def asked(line: BatchLine) -> Answer:
        return await ask(app, line.url, line.body, state={})

    with progress_bar("Requests") as bar:
        task = bar.add_task("", total=total, note="")
        lines = read_lines(requests, limits)
        width = WIDTH * engine.config.max_num_seqs
        turns = asyncio.Semaphore(width)
        async with aclosing(answers(lines, asked, turns=turns, ahead=AHEAD * width)) as answered:
            async for line, answer in answered:
                failed += answer.status >= 400
                done += 1
                results.write(result_line(line.custom_id, answer, prefix="llmjax-", apart=True))
                bar.update(task, completed=done, note=f"{failed} failed" if failed else "")
    return Counts(done - failed, failed)
