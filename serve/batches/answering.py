"""Answers the requests of a batch, many at once, and gives the results in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from llmjax.serve.batches.inner import Answer
from llmjax.serve.batches.lines import BatchLine

AHEAD = 8  # times as many requests as are asked at once: a good ``ahead``


async def answers(
    lines: Iterable[BatchLine], ask: Callable[[BatchLine], Awaitable[Answer]], *, turns: asyncio.Semaphore, ahead: int
) -> AsyncGenerator[tuple[BatchLine, Answer], None]:
    """The answer to each request. Where the server is full, a request waits and asks again.

    Args:
        turns: how many are asked at once, with those of others that have the same semaphore.
        ahead: how many may be asked or answered before the one whose turn it is.
    """

    async def answered(line: BatchLine) -> Answer:
        async with turns:
            while (answer := await ask(line)).retry_after is not None:
                await asyncio.sleep(answer.retry_after)
            return answer

    waiting: deque[tuple[BatchLine, asyncio.Task[Answer]]] = deque()
    try:
        rest = iter(lines)
        while (line := await asyncio.to_thread(next, rest, None)) is not None:  # one may be large
            waiting.append((line, asyncio.create_task(answered(line))))
            if len(waiting) >= ahead:
                first, task = waiting.popleft()
                yield first, await task
        while waiting:
            first, task = waiting.popleft()
            yield first, await task
    finally:
        for _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
