"""How much of their pace text streams keep while an encoder works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from llmjax import AsyncLLM, SamplingParams
from llmjax.bench.random_mm import random_text
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.sampling.params import RequestOutputKind

TEXT = 32  # tokens of a stream's prompt


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The pace of streams.

    Attributes:
        size: width and height of the pictures.
        images: pictures of a request, all of which are new.
        alone, beside: tokens a second, of all streams: without pictures, and from the arrival of a request with
            pictures until the last one is encoded and its prompt begins.
        encoder: seconds of that, the median of all requests.
    """

    size: str
    images: int
    alone: float
    beside: float
    encoder: float

    @property
    def share(self) -> float:
        """The part of their pace that they keep."""
        return self.beside / self.alone


async def measured(config: EngineConfig, files: Sequence[bytes], *, streams: int, images: int, size: str) -> Beside:
    """Measures an engine of its own.

    Args:
        config: the engine.
        files: pictures, of which each request gets the next ones; the first request's are not counted, as it compiles.
        streams: text streams.
        images: pictures of a request.
        size: width and height of the pictures.

    Raises:
        ConfigError: the model sees no pictures, or there are too few of them.
    """
    requests = len(files) // images
    if requests < 2:
        raise ConfigError(f"{len(files)} pictures are too few for two requests of {images}")
    llm = AsyncLLM.from_config(config)
    try:
        if llm.images is None:
            raise ConfigError(f"{config.model} sees no pictures")
        await llm.warm_up()
        return await _measured(llm, files, streams=streams, images=images, requests=requests, size=size)
    finally:
        await llm.shutdown(drain_timeout=0)


async def _measured(
    llm: AsyncLLM, files: Sequence[bytes], *, streams: int, images: int, requests: int, size: str
) -> Beside:
    assert llm.images is not None
    rng, placeholder = np.random.default_rng(0), list(llm.images.processor.placeholder)
    arrived = list[float]()
    drawn = partial(random_text, llm.images.processor, TEXT, vocab_size=llm.info.vocab_size, rng=rng)

    async def stream(number: int) -> None:
        length = llm.info.max_model_len - TEXT
        params = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        while True:
            prompt = {"prompt_token_ids": drawn()}
            async for output in llm.generate(prompt, params, f"text-{number}-{time.monotonic_ns()}"):
                now = time.monotonic()
                arrived.extend(now for _ in output.outputs[0].token_ids)

    tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
    try:
        alone, beside = list[tuple[float, float]](), list[tuple[float, float]]()
        for number in range(requests):
            pictures = llm.images.prepared(files[number * images : (number + 1) * images])
            ids = [*placeholder * images, *drawn()]
            prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}
            params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            async for output in llm.generate(prompt, params, f"picture-{number}"):
                metrics = output.metrics
            assert metrics is not None and metrics.first_scheduled_time is not None
            beside.append((metrics.arrival_time, metrics.first_scheduled_time))
            begin = time.monotonic()
            await asyncio.sleep(metrics.first_scheduled_time - metrics.arrival_time)
            alone.append((begin, time.monotonic()))
            if any(task.done() for task in tasks):
                break
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
    times = np.array(arrived)

    def pace(windows: Sequence[tuple[float, float]]) -> float:
        tokens = sum(int(((times >= begin) & (times < end)).sum()) for begin, end in windows)
        return tokens / sum(end - begin for begin, end in windows)

    seconds = float(np.median([end - begin for begin, end in beside[1:]]))
    return Beside(size=size, images=images, alone=pace(alone[1:]), beside=pace(beside[1:]), encoder=seconds)
