"""``llmjax bench serve``: a server under load, over HTTP; a running one, or one started for the run."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmjax.bench.arrivals import arrival_times
from llmjax.bench.client import OpenAIClient
from llmjax.bench.dataset import Sample
from llmjax.bench.load import Target, run_load
from llmjax.bench.metrics import Result, summarize
from llmjax.bench.options import DatasetOptions, ReportOptions, as_setup, options_of
from llmjax.bench.own_server import ServerFailed, own_server, wait_until_ready
from llmjax.bench.report import check_writable, publish
from llmjax.bench.scrape import work_of_server
from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.cli.sampling import add_sampling_flags, given_sampling, sampling_settings
from llmjax.config import EngineConfig, check_choices, setting
from llmjax.errors import ConfigError
from llmjax.settings import Setting, settings_of

# The benchmark measures one stream of text a request, of the length that its data set says.
NOT_MEASURED = ("n", "max_tokens", "logprobs", "prompt_logprobs", "detokenize", "ignore_eos")
QUIET_SECONDS = 10.0  # without a compilation, after which a server counts as warm: one program takes seconds


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The server and how it is loaded; names follow vLLM's benchmark."""

    base_url: str | None = setting(None, "server to measure (default: one is started for the run)", section="load")
    host: str | None = setting(None, "its host, instead of --base-url (default: 127.0.0.1)")
    port: int | None = setting(None, "its port, instead of --base-url (default: 8000)")
    backend: str = setting("openai", "completions or chat completions", choices=("openai", "openai-chat"))
    endpoint: str | None = setting(None, "path (default: the backend's own)")
    header: Sequence[str] = setting((), "KEY=VALUE to send with every request", separator=None)
    api_key: str | None = setting(None, "key for the server")
    extra_body: dict[str, Any] = setting({}, "further fields of every request, as JSON")  # noqa: RUF009
    request_rate: float = setting(math.inf, "requests a second; inf: all at once")
    burstiness: float = setting(1.0, "1: Poisson arrivals; below: more bursty; above: more even")
    max_concurrency: int | None = setting(None, "requests under way at most (default: no limit)")
    num_warmups: int = setting(4, "requests before the clock starts, sent until the server compiles no more")
    ignore_eos: bool = setting(False, "let every answer have its full length")
    ready_check_timeout_sec: float = setting(600.0, "seconds to wait for the server")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.base_url is not None and (self.host is not None or self.port is not None):
            raise ConfigError("the server is --base-url, or --host and --port: not both")
        for name in ("request_rate", "burstiness", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups must be at least 0, not {self.num_warmups}")
        if math.isinf(self.burstiness):
            raise ConfigError("--burstiness must be finite")
        self.headers()

    @property
    def url(self) -> str | None:
        """The server's address; None: the benchmark starts its own."""
        if self.base_url is None and (self.host is not None or self.port is not None):
            return f"http://{self.host or '127.0.0.1'}:{self.port or 8000}"
        return self.base_url

    def headers(self) -> dict[str, str]:
        pairs = [header.partition("=") for header in self.header]
        for (name, equals, _), header in zip(pairs, self.header, strict=True):
            if not name or not equals:
                raise ConfigError(f"--header must be KEY=VALUE, not {header!r}")
        return {name: value for name, _, value in pairs}


@dataclass(frozen=True, kw_only=True)
class BenchmarkPlan:
    """A run, as the command line says it."""

    load: LoadOptions
    dataset: DatasetOptions
    report: ReportOptions
    engine: EngineConfig
    model: str | None
    sampling: Mapping[str, Any]


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints its table; the status is 1 if no request succeeded.

    Raises:
        LLMJaxError: a setting is wrong, or the server cannot be started or reached.
    """
    plan = parse(argv)
    check_writable(plan.report.output_json)
    result = asyncio.run(run(plan))
    return 0 if result.completed else 1


def parse(argv: list[str]) -> BenchmarkPlan:
    """The run that a command line asks for.

    Raises:
        ConfigError: a flag or value is wrong, or has no effect on the server of --base-url.
    """
    sampling = sampling_settings(without=NOT_MEASURED, temperature=0.0)
    parser = Parser(prog="llmjax bench serve", description="Send requests to a server over HTTP and time the streams.")
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    for cls, section in ((LoadOptions, "load"), (DatasetOptions, "prompts"), (ReportOptions, "report")):
        add_settings(parser, settings_of(cls).values(), section=section)
    add_sampling_flags(parser, sampling)
    add_config_flags(parser)
    values = parser.parse(argv)
    load = options_of(LoadOptions, values)
    if load.url is not None:
        _check_effect(values)
    return BenchmarkPlan(
        load=load,
        dataset=options_of(DatasetOptions, values),
        report=options_of(ReportOptions, values),
        engine=configs_of(values, model=values.positional_model).engine,
        model=values.positional_model or getattr(values, "model", None),
        sampling=_sampling_fields(values, sampling),
    )


async def run(plan: BenchmarkPlan) -> Result:
    """Measures the server and publishes what was seen.

    Raises:
        LLMJaxError: the server cannot be started or reached.
    """
    if plan.load.url is not None:
        return await _measure(plan, plan.load.url, plan.model)
    async with own_server(plan.engine, seconds=plan.load.ready_check_timeout_sec) as server:
        return await _measure(plan, server.url, None)


async def _measure(plan: BenchmarkPlan, url: str, model: str | None) -> Result:
    load, report = plan.load, plan.report
    client = OpenAIClient(url, api_key=load.api_key, headers=load.headers())
    try:
        await wait_until_ready(client, seconds=load.ready_check_timeout_sec)
        name = model or await client.first_model()
        fields = {**plan.sampling, "ignore_eos": True} if load.ignore_eos else plan.sampling
        target = Target(
            client=client,
            backend=load.backend,
            model=name,
            fields={**fields, **load.extra_body},
            endpoint=load.endpoint,
        )
        samples = await _samples(plan, client, name)
        timed, warm_up = samples[: plan.dataset.num_prompts], samples[plan.dataset.num_prompts :]
        await _warm_up(target, warm_up, seconds=load.ready_check_timeout_sec)
        rng = np.random.default_rng(plan.engine.seed)
        arrivals = arrival_times(len(timed), rate=load.request_rate, burstiness=load.burstiness, rng=rng)
        before = await work_of_server(client)
        records = await run_load(target, timed, arrivals.tolist(), max_concurrency=load.max_concurrency)
        after = await work_of_server(client)
    finally:
        await client.close()
    work = after - before if after is not None and before is not None else None
    result = summarize(records, percentiles=report.metric_percentiles, work=work)
    setup = {"benchmark": "serve", "model": name, **as_setup(load, plan.dataset)}
    setup.pop("api_key")
    setup.pop("header")  # may hold a key as well
    title = (
        f"{name}: {plan.dataset.num_prompts} {plan.dataset.dataset_name} prompts at {load.request_rate:g} requests/s"
    )
    publish(result, title=title, output_json=report.output_json, setup=setup, detailed=report.save_detailed)
    return result


async def _samples(plan: BenchmarkPlan, client: OpenAIClient, model: str) -> list[Sample]:
    """The prompts; the server counts the tokens of ShareGPT texts."""

    def count_tokens(text: str) -> int:
        future = asyncio.run_coroutine_threadsafe(client.post("/tokenize", {"model": model, "prompt": text}), loop)
        return int(future.result()["count"])

    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(
        plan.dataset.samples, seed=plan.engine.seed, count_tokens=count_tokens, extra=plan.load.num_warmups
    )


async def _warm_up(target: Target, samples: Sequence[Sample], *, seconds: float) -> None:
    """Sends the samples, again and again as long as the server still compiles in the background.

    Raises:
        ServerFailed: one of them fails, or the server compiles for longer than ``seconds``.
    """
    if not samples:
        return
    begin = quiet_since = time.monotonic()
    seen = await work_of_server(target.client)
    while True:
        for record in await run_load(target, samples, [0.0] * len(samples), max_concurrency=None):
            if record.error is not None:
                raise ServerFailed(f"a request of the warm-up failed: {record.error}")
        work, now = await work_of_server(target.client), time.monotonic()
        if work is None or seen is None:
            return  # another server: nothing says when it has compiled
        if work.compilations != seen.compilations:
            seen, quiet_since = work, now
        if now - quiet_since >= QUIET_SECONDS:
            return
        if now - begin > seconds:
            raise ServerFailed(f"the server still compiles after {seconds:g} s")


def _sampling_fields(values: argparse.Namespace, sampling: dict[str, Setting]) -> dict[str, Any]:
    """Request fields: greedy unless said otherwise, so that runs can be compared."""
    return {"temperature": 0.0, **given_sampling(values, sampling)}


def _check_effect(values: argparse.Namespace) -> None:
    own = {"model", "seed"}  # the name to ask for, and the seed of prompts and arrivals
    idle = [name for name in settings_of(EngineConfig) if hasattr(values, name) and name not in own]
    if values.config is not None or idle:
        flag = "--" + idle[0].replace("_", "-") if idle else "--config"
        raise ConfigError(f"{flag} has no effect on the server that is measured: leave it out, or let one be started")
