"""``llmjax bench latency``: batches of equal requests, one after the other, timed token by token."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmjax.bench.dataset import RandomShape, Sample, random_samples
from llmjax.bench.metrics import Distribution, EngineWork, RequestRecord, summarize
from llmjax.bench.options import ReportOptions, as_setup, options_of
from llmjax.bench.report import check_writable, publish
from llmjax.cli.parser import Parser, add_config_flags, add_model, add_settings, configs_of
from llmjax.config import setting
from llmjax.errors import ConfigError
from llmjax.migration import vllm_bench
from llmjax.sampling.params import RequestOutputKind, SamplingParams
from llmjax.settings import settings_of

if TYPE_CHECKING:
    from llmjax import LLM, AsyncLLM
    from llmjax.engine.core.stats import EngineTotals


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """The batch; names follow vLLM's benchmark."""

    input_len: int = setting(32, "tokens of a prompt", section="batch")
    output_len: int = setting(128, "tokens of an answer")
    batch_size: int = setting(1, "requests at once")
    num_iters: int = setting(5, "batches that are timed")
    num_iters_warmup: int = setting(2, "batches before them that are not")
    random_vocab_size: int = setting(10_000, "token ids of prompts are below this")
    profile: bool = setting(False, "write a profile of the timed batches to --profile-dir")

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 1), ("num_iters", 1), ("num_iters_warmup", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, not {getattr(self, name)}")
        self.shape()

    def shape(self, vocab_size: int | None = None) -> RandomShape:
        return RandomShape(
            input_len=self.input_len,
            output_len=self.output_len,
            vocab_size=min(self.random_vocab_size, vocab_size or self.random_vocab_size),
        )


def command_line() -> Parser:
    """The flags of the benchmark."""
    parser = Parser(prog="llmjax bench latency", description="Time batches of equal requests, one after the other.")
    add_model(parser)
    add_settings(parser, settings_of(LatencyOptions).values(), section="batch")
    add_settings(parser, settings_of(ReportOptions).values(), section="report")
    add_config_flags(parser, rows=vllm_bench.OFFLINE)
    return parser


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints its table.

    Raises:
        LLMJaxError: a setting is wrong, or the model cannot be loaded.
    """
    values = command_line().parse(argv)
    options, report = options_of(LatencyOptions, values), options_of(ReportOptions, values)
    check_writable(report.output_json, plot=report.plot, compare=report.compare)
    config = configs_of(values, model=values.positional_model).engine
    from llmjax import AsyncLLM

    llm = AsyncLLM.from_config(config)
    batches = asyncio.run(measure(llm, options, seed=config.seed))
    result = summarize(
        [record for batch in batches.records for record in batch],
        percentiles=report.metric_percentiles,
        work=batches.work,
    )
    seconds = [max(r.end for r in batch) - min(r.start for r in batch) for batch in batches.records]
    named = {"model": llm.model_name, "model_id": llm.model_name}
    setup = {"benchmark": "latency", **named, **as_setup(options), **_batch_fields(seconds)}
    title = f"{llm.model_name}: {options.batch_size} × ({options.input_len} in, {options.output_len} out)"
    publish(
        result,
        title=title,
        output_json=report.output_json,
        setup=setup,
        detailed=report.save_detailed,
        plot=report.plot,
        compare=report.compare,
    )
    return 0


@dataclass(frozen=True)
class Batches:
    """The timed requests, batch by batch, and what the engine did for them."""

    records: list[list[RequestRecord]]
    work: EngineWork


async def measure(llm: AsyncLLM, options: LatencyOptions, *, seed: int) -> Batches:
    """Runs the warm-up and the timed batches, and stops the engine.

    Args:
        seed: seed of the prompts; every batch has new ones, so that the prefix cache has no part in the result.
    """
    rng, shape = np.random.default_rng(seed), options.shape(llm.info.vocab_size)
    records = []
    try:
        await llm.warm_up()
        for i in range(options.num_iters_warmup + options.num_iters):
            if i == options.num_iters_warmup:
                before = work_of(llm.stats)
                if options.profile:
                    await llm.start_profile()
            samples = random_samples(options.batch_size, shape, rng)
            requests = [stream(llm, sample, f"bench-{i}-{j}") for j, sample in enumerate(samples)]
            batch = await asyncio.gather(*requests)
            if i >= options.num_iters_warmup:
                records.append(batch)
        work = work_of(llm.stats) - before
        if options.profile:
            await llm.stop_profile()
        return Batches(records=records, work=work)
    finally:
        await llm.shutdown(drain_timeout=0)


def sampling(sample: Sample, llm: AsyncLLM | LLM) -> SamplingParams:
    """Greedy, and exactly the sample's length; without a tokenizer, without text."""
    detokenize = llm.tokenizer is not None
    return SamplingParams(temperature=0.0, max_tokens=sample.output_tokens, ignore_eos=True, detokenize=detokenize)


async def stream(llm: AsyncLLM, sample: Sample, request_id: str) -> RequestRecord:
    """One greedy request of exactly the sample's length, timed as its tokens arrive."""
    params = sampling(sample, llm).clone(output_kind=RequestOutputKind.DELTA)
    start = time.perf_counter()
    times: list[float] = []
    texts: list[str] = []
    tokens = prompt_tokens = 0
    async with aclosing(llm.generate(sample.prompt, params, request_id)) as outputs:
        async for output in outputs:
            new = output.outputs[0]
            prompt_tokens = len(output.prompt_token_ids)
            if new.token_ids:
                times.append(time.perf_counter())
                tokens += len(new.token_ids)
                texts.append(new.text)
    return RequestRecord(
        start=start,
        end=times[-1] if times else time.perf_counter(),
        prompt_tokens=prompt_tokens,
        output_tokens=tokens,
        chunk_times=times,
        text="".join(texts),
    )


def work_of(totals: EngineTotals) -> EngineWork:
    """A copy of the engine's running totals."""
    return EngineWork(steps=totals.steps, host_seconds=totals.host.total, compilations=totals.compilations)


def _batch_fields(seconds: list[float]) -> dict[str, Any]:
    """The JSON fields of vLLM's latency benchmark, in seconds."""
    distribution = Distribution.of(seconds, (10, 25, 50, 75, 90, 99))
    assert distribution is not None  # there is at least one batch
    percentiles = {f"{p:g}": value for p, value in distribution.percentiles.items()}
    return {"avg_latency": distribution.mean, "latencies": seconds, "percentiles": percentiles}
