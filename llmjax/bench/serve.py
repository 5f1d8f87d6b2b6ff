"""``llmjax bench serve``: a server under load, over HTTP; a running one, or one started for the run."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.adapter_settings import AdapterModule, modules_of
from llmjax.bench.arrivals import RAMPS, arrival_times, ramp_rates, times_at
from llmjax.bench.backends import BACKENDS
from llmjax.bench.client import OpenAIClient
from llmjax.bench.dataset import Sample
from llmjax.bench.load import Target, run_load
from llmjax.bench.metrics import Result, summarize
from llmjax.bench.options import DatasetOptions, LoadReportOptions, as_setup, options_of, pairs
from llmjax.bench.own_server import ServerFailed, own_server, wait_until_ready
from llmjax.bench.report import check_writable, publish
from llmjax.bench.scrape import metrics_page, parse_drafts, parse_work, work_of_server
from llmjax.cli.models import KEY_VARIABLE, key_for_server
from llmjax.cli.parser import Parser, add_config_flags, add_model, add_settings, configs_of
from llmjax.cli.sampling import add_sampling_flags, given_sampling, sampling_settings
from llmjax.config import Alias, EngineConfig, check_values, setting
from llmjax.errors import ConfigError
from llmjax.migration import vllm_bench
from llmjax.settings import settings_of

# The benchmark measures one stream of text a request, of the length that its data set says.
NOT_MEASURED = ("n", "max_tokens", "logprobs", "prompt_logprobs", "detokenize", "ignore_eos")
SAMPLING = sampling_settings(without=NOT_MEASURED, temperature=0.0)
TEXTS_AT_ONCE = 32  # that the server is asked for before the run
QUIET_SECONDS = 10.0  # without a compilation, after which a server counts as warm: one program takes seconds


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The server and how it is loaded; names follow vLLM's benchmark."""

    base_url: str | None = setting(None, "server to measure (default: one is started for the run)", section="load")
    host: str | None = setting(None, "its host, instead of --base-url (default: 127.0.0.1)")
    port: int | None = setting(None, "its port, instead of --base-url (default: 8000)")
    backend: str = setting(
        "openai",
        "API: completions, chat completions, responses, or one of those for vectors",
        choices=tuple(BACKENDS),
        words={"vllm": "openai"},
    )
    endpoint: str | None = setting(None, "path (default: the backend's own)")
    header: Sequence[str] = setting((), "KEY=VALUE to send with every request", separator=None, several=True)
    api_key: str | None = setting(
        None, f"key for the server (default: {KEY_VARIABLE}, unless --header Authorization=... is given)"
    )
    insecure: bool = setting(False, "take any certificate of the server")
    extra_body: dict[str, Any] = setting({}, "further fields of every request, as JSON")  # noqa: RUF009
    chat_template_kwargs: dict[str, Any] = setting(  # noqa: RUF009
        {}, "variables of the server's chat template, as JSON, with --backend openai-chat or openai-responses"
    )
    logprobs: int | None = setting(None, "log-probabilities to ask for with every token")
    request_id_prefix: str | None = setting(None, "the requests' X-Request-Id are this and a number")
    request_rate: float = setting(math.inf, "requests a second; inf: all at once")
    burstiness: float = setting(1.0, "1: Poisson arrivals; below: more bursty; above: more even")
    ramp_up_strategy: str | None = setting(
        None, "how the rate rises during the run (linear, exponential), instead of --request-rate"
    )
    ramp_up_start_rps: float | None = setting(None, "requests a second at its beginning")
    ramp_up_end_rps: float | None = setting(None, "requests a second at its end")
    self_timed: bool | None = setting(None, "send requests at the times of a timed_trace (default: on with one)")
    max_concurrency: int | None = setting(None, "requests under way at most (default: no limit)")
    num_warmups: int = setting(4, "requests before the clock starts, sent until the server compiles no more")
    ignore_eos: bool | None = setting(
        None, "let every answer have its full length (default: on with random and timed_trace)"
    )
    lora_assignment: str = setting(
        "random", "how requests take the adapters of --lora-modules", choices=("random", "round-robin")
    )
    profile: bool = setting(False, "have the server write a profile of the run (it needs --profile-dir and a key)")
    progress: bool = setting(True, "show a bar in a terminal", aliases=(Alias("--disable-tqdm", value=False),))
    ready_check_timeout_sec: float = setting(600.0, "seconds to wait for the server")

    def __post_init__(self) -> None:
        check_values(self)
        if self.base_url is not None and (self.host is not None or self.port is not None):
            raise ConfigError("the server is --base-url, or --host and --port: not both")
        for name in ("request_rate", "burstiness", "max_concurrency", "ramp_up_start_rps", "ramp_up_end_rps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups must be at least 0, not {self.num_warmups}")
        if math.isinf(self.burstiness):
            raise ConfigError("--burstiness must be finite")
        if self.chat_template_kwargs and self.backend not in ("openai-chat", "openai-responses"):
            raise ConfigError("--chat-template-kwargs needs --backend openai-chat or openai-responses")
        if self.logprobs is not None and not BACKENDS[self.backend].streams:
            raise ConfigError(f"--logprobs: --backend {self.backend} makes no tokens")
        self._check_ramp()
        self.headers()

    def _check_ramp(self) -> None:
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ends != (None, None):
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
            return
        if self.ramp_up_strategy not in RAMPS:
            raise ConfigError(f"--ramp-up-strategy must be {' or '.join(RAMPS)}, not {self.ramp_up_strategy!r}")
        start, end = ends
        if start is None or end is None or math.isinf(end) or start > end:
            raise ConfigError(
                "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, not below it and finite"
            )
        if not math.isinf(self.request_rate):
            raise ConfigError("--request-rate: with --ramp-up-strategy the rate follows from it")

    @property
    def url(self) -> str | None:
        """The server's address; None: the benchmark starts its own."""
        if self.base_url is None and (self.host is not None or self.port is not None):
            host = self.host or "127.0.0.1"
            return f"http://{f'[{host}]' if ':' in host else host}:{self.port or 8000}"
        return self.base_url

    def headers(self) -> dict[str, str]:
        return pairs(self.header, flag="--header")

    @property
    def key(self) -> str | None:
        """The key that is sent: that of the environment where neither a flag nor a header has one."""
        if any(name.lower() == "authorization" for name in self.headers()):
            return self.api_key
        return key_for_server(self.api_key)

    @property
    def fields(self) -> dict[str, Any]:
        """Request fields that flags stand for."""
        values: dict[str, Any] = {}
        if self.chat_template_kwargs:
            values["chat_template_kwargs"] = self.chat_template_kwargs
        if self.logprobs is not None:
            named = {"openai": "logprobs", "openai-responses": "top_logprobs"}.get(self.backend)
            values |= {named: self.logprobs} if named else {"logprobs": True, "top_logprobs": self.logprobs}
        return values

    def rates(self, count: int) -> np.ndarray | None:
        """Requests a second at each of ``count`` requests, if they rise."""
        if self.ramp_up_strategy is None:
            return None
        assert self.ramp_up_start_rps is not None and self.ramp_up_end_rps is not None  # checked above
        return ramp_rates(count, strategy=self.ramp_up_strategy, start=self.ramp_up_start_rps, end=self.ramp_up_end_rps)


@dataclass(frozen=True, kw_only=True)
class BenchmarkPlan:
    """A run, as the command line says it."""

    load: LoadOptions
    dataset: DatasetOptions
    report: LoadReportOptions
    engine: EngineConfig
    model: str | None
    sampling: Mapping[str, Any]
    adapters: Sequence[str] = ()  # names that requests take


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints its table; the status is 1 if no request succeeded.

    Raises:
        LLMJaxError: a setting is wrong, or the server cannot be started or reached.
    """
    plan = parse(argv)
    check_writable(plan.report.output_json, plot=plan.report.plot, compare=plan.report.compare)
    result = asyncio.run(run(plan))
    return 0 if result.completed else 1


def command_line() -> Parser:
    """The flags of the benchmark."""
    parser = Parser(prog="llmjax bench serve", description="Send requests to a server over HTTP and time the streams.")
    add_model(parser)
    for cls, section in ((LoadOptions, "load"), (DatasetOptions, "prompts"), (LoadReportOptions, "report")):
        add_settings(parser, settings_of(cls).values(), section=section)
    add_sampling_flags(parser, SAMPLING)
    add_config_flags(parser, rows=vllm_bench.SERVE)
    return parser


def parse(argv: list[str]) -> BenchmarkPlan:
    """The run that a command line asks for.

    Raises:
        ConfigError: a flag or value is wrong, or has no effect on the server of --base-url.
    """
    values = command_line().parse(argv)
    adapters = _adapters(values)
    load, dataset = options_of(LoadOptions, values), options_of(DatasetOptions, values)
    if load.url is not None:
        _check_effect(values)
    if (dataset.dataset_name == "random-rerank") != (load.backend == "vllm-rerank"):
        raise ConfigError("--dataset-name random-rerank goes with --backend vllm-rerank")
    if dataset.dataset_name == "random-mm" and not BACKENDS[load.backend].sees:
        raise ConfigError("--dataset-name random-mm goes with --backend openai-chat or openai-responses")
    if dataset.random_batch_size > 1 and BACKENDS[load.backend].streams:
        raise ConfigError("--random-batch-size needs a --backend for vectors")
    if load.self_timed is not None and dataset.dataset_name != "timed_trace":
        raise ConfigError("--self-timed goes with --dataset-name timed_trace")
    engine = configs_of(values, model=values.positional_model).engine
    served = next(iter(engine.served_names), None) if hasattr(values, "served_model_name") else None
    return BenchmarkPlan(
        load=load,
        dataset=dataset,
        report=options_of(LoadReportOptions, values),
        engine=engine,
        model=served or values.positional_model or getattr(values, "model", None),
        sampling=_sampling_fields(values) if BACKENDS[load.backend].streams else {},
        adapters=adapters,
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
    load, report, dataset = plan.load, plan.report, plan.dataset
    client = OpenAIClient(url, api_key=load.key, headers=load.headers(), insecure=load.insecure)
    try:
        await wait_until_ready(client, seconds=load.ready_check_timeout_sec)
        name = model or await client.first_model()
        saved = _result_path(plan, name)
        target = _target(plan, client, name)
        samples = await _samples(plan, target)
        warm_up, timed = samples[len(samples) - load.num_warmups :], samples[: len(samples) - load.num_warmups]
        await _warm_up(target, warm_up, seconds=load.ready_check_timeout_sec)
        arrivals = _arrivals(plan, timed)
        before = await metrics_page(client)
        if load.profile:
            await client.command("/start_profile")
        records = await run_load(target, timed, arrivals, max_concurrency=load.max_concurrency, progress=load.progress)
        if load.profile:
            await client.command("/stop_profile")
        after = await metrics_page(client)
    finally:
        await client.close()
    result = summarize(
        records,
        percentiles=report.metric_percentiles,
        latencies=report.percentile_metrics,
        objectives=report.objectives,
        work=_since(parse_work(before), parse_work(after)),
        drafts=_since(parse_drafts(before), parse_drafts(after)),
    )
    publish(
        result,
        title=f"{name}: {len(timed)} {dataset.dataset_name} prompts at {_rate(load)} requests/s",
        output_json=report.output_json,
        setup=_setup(plan, name),
        detailed=report.save_detailed,
        saved=saved,
        append=report.append_result,
        plot=report.plot,
        compare=report.compare,
    )
    return result


def _target(plan: BenchmarkPlan, client: OpenAIClient, model: str) -> Target:
    load = plan.load
    fields = {**plan.sampling, **load.fields}
    full = plan.dataset.has_lengths if load.ignore_eos is None else load.ignore_eos
    if full and BACKENDS[load.backend].streams:
        fields["ignore_eos"] = True
    return Target(
        client=client,
        backend=load.backend,
        model=model,
        fields={**fields, **load.extra_body},
        endpoint=load.endpoint,
        id_prefix=load.request_id_prefix,
        adapters=_assigned(plan),
    )


def _assigned(plan: BenchmarkPlan) -> list[str]:
    """The adapter of each request, by its number."""
    if plan.load.lora_assignment == "round-robin" or not plan.adapters:
        return list(plan.adapters)
    chosen = np.random.default_rng(plan.engine.seed).integers(len(plan.adapters), size=plan.dataset.num_prompts)
    return [plan.adapters[int(number)] for number in chosen]


def _arrivals(plan: BenchmarkPlan, timed: Sequence[Sample]) -> list[float]:
    """Seconds from now at which each request is sent."""
    load, rng = plan.load, np.random.default_rng(plan.engine.seed)
    if plan.dataset.dataset_name == "timed_trace" and load.self_timed is not False:
        return [sample.due or 0.0 for sample in timed]
    if (rates := load.rates(len(timed))) is not None:
        return times_at(rates, burstiness=load.burstiness, rng=rng).tolist()
    return arrival_times(len(timed), rate=load.request_rate, burstiness=load.burstiness, rng=rng).tolist()


def _since(before: Any, after: Any) -> Any:
    return None if before is None or after is None else after - before


def _rate(load: LoadOptions) -> str:
    if load.ramp_up_strategy is None:
        return f"{load.request_rate:g}"
    return f"{load.ramp_up_start_rps:g} to {load.ramp_up_end_rps:g}"


def _setup(plan: BenchmarkPlan, model: str) -> dict[str, Any]:
    """What was measured, as fields of the result, also under vLLM's names; without what may hold keys."""
    setup = {"benchmark": "serve", "model": model, **as_setup(plan.load, plan.dataset)}
    for secret in ("api_key", "header"):
        setup.pop(secret)
    return {
        **setup,
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": plan.load.backend,
        "label": plan.report.label,
        "model_id": model,
        "tokenizer_id": None,  # the server counts
        **pairs(plan.report.metadata, flag="--metadata"),
    }


def _result_path(plan: BenchmarkPlan, model: str) -> Path | None:
    """The file of ``--save-result``, whose folder is made if it is not there.

    Raises:
        ConfigError: it cannot be.
    """
    load, report = plan.load, plan.report
    if not report.saves:
        return None
    rate = f"{load.request_rate:g}qps"
    if load.ramp_up_strategy is not None:
        rate = f"ramp-up-{load.ramp_up_strategy}-{load.ramp_up_start_rps:g}qps-{load.ramp_up_end_rps:g}qps"
    at_once = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
    time = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = report.result_filename or f"{report.label or load.backend}-{rate}{at_once}-{Path(model).name}-{time}.json"
    folder = Path(report.result_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--result-dir: cannot make {folder}: {error.strerror}") from None
    return folder / name


async def _samples(plan: BenchmarkPlan, target: Target) -> list[Sample]:
    """The prompts; the server counts the tokens of ShareGPT's texts, and writes random tokens as texts where its API
    takes these only.

    Raises:
        RequestFailed: the server does neither.
    """
    client, model = target.client, target.model

    def count_tokens(text: str) -> int:
        future = asyncio.run_coroutine_threadsafe(client.post("/tokenize", {"model": model, "prompt": text}), loop)
        return int(future.result()["count"])

    loop = asyncio.get_running_loop()
    samples = await asyncio.to_thread(
        plan.dataset.samples, seed=plan.engine.seed, count_tokens=count_tokens, extra=plan.load.num_warmups
    )
    if not target.api.only_texts:
        return samples
    gate = asyncio.Semaphore(TEXTS_AT_ONCE)

    async def text(prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        async with gate:
            return str((await client.post("/detokenize", {"model": model, "tokens": prompt}))["prompt"])

    async def written(sample: Sample) -> Sample:
        first, *more = await asyncio.gather(*map(text, (sample.prompt, *sample.more)))
        return dataclasses.replace(sample, prompt=first, more=tuple(more))

    return await asyncio.gather(*map(written, samples))


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


def _sampling_fields(values: argparse.Namespace) -> dict[str, Any]:
    """Request fields: greedy unless said otherwise, so that runs can be compared."""
    return {"temperature": 0.0, **given_sampling(values, SAMPLING)}


def _adapters(values: argparse.Namespace) -> list[str]:
    """Names of the adapters that requests take. A server that runs has them already: their names are enough."""
    modules = getattr(values, "lora_modules", None) or []
    if _runs(values) and modules:
        delattr(values, "lora_modules")
        return [item if "=" not in item else AdapterModule.of(item).name for item in modules]
    return [module.name for module in modules_of(modules)]


def _runs(values: argparse.Namespace) -> bool:
    """Whether the server that is measured runs already."""
    return any(getattr(values, name, None) is not None for name in ("base_url", "host", "port"))


def _check_effect(values: argparse.Namespace) -> None:
    client_flags = {"model", "served_model_name", "seed"}  # the name to ask for, and the seed of prompts and arrivals
    for name in ("tokenizer", "skip_tokenizer_init"):
        if hasattr(values, name):
            delattr(values, name)
            print(f"llmjax: note: --{name.replace('_', '-')}: the server counts tokens", file=sys.stderr)
    idle = [name for name in settings_of(EngineConfig) if hasattr(values, name) and name not in client_flags]
    if values.config is not None or idle:
        flag = "--" + idle[0].replace("_", "-") if idle else "--config"
        raise ConfigError(f"{flag} has no effect on the server that is measured: leave it out, or let one be started")
