"""Answers the requests of a batch, many at once, and gives the results in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from llmjax.serve.batches.inner import Answer
from llmjax.serve.batches.lines import BatchLine

AHEAD = 8  # times ``width`` requests may be answered before the one whose turn it is


async def answers(
    lines: Iterable[BatchLine], ask: Callable[[BatchLine], Awaitable[Answer]], *, width: int
) -> AsyncGenerator[tuple[BatchLine, Answer], None]:
    """The answer to each request. Where the server is full, a request waits and asks again.

    Args:
        width: how many are asked at once.
    """
    turns = asyncio.Semaphore(width)

    async def answered(line: BatchLine) -> Answer:
        async with turns:
            while (answer := await ask(line)).retry_after is not None:
                await asyncio.sleep(answer.retry_after)
            return answer

    waiting: deque[tuple[BatchLine, asyncio.Task[Answer]]] = deque()
    try:
        for line in lines:
            waiting.append((line, asyncio.create_task(answered(line))))
            if len(waiting) >= AHEAD * width:
                first, task = waiting.popleft()
                yield first, await task
        while waiting:
            first, task = waiting.popleft()
            yield first, await task
    finally:
        for _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
