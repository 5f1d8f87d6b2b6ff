"""``llmjax bench throughput``: many prompts at once through the engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmjax.adapters.request import LoRARequest
from llmjax.bench.dataset import Sample
from llmjax.bench.latency import sampling, work_of
from llmjax.bench.metrics import EngineWork, RequestRecord, Result, summarize
from llmjax.bench.options import DatasetOptions, ReportOptions, as_setup, options_of
from llmjax.bench.report import check_writable, publish
from llmjax.cli.parser import Parser, add_config_flags, add_model, add_settings, configs_of
from llmjax.config import setting
from llmjax.errors import ConfigError
from llmjax.migration import vllm_bench
from llmjax.outputs import RequestOutput
from llmjax.settings import settings_of

if TYPE_CHECKING:
    from llmjax import LLM


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """How the prompts are run."""

    num_warmups: int = setting(4, "requests before the clock starts", section="run")
    profile: bool = setting(False, "write a profile of the timed requests to --profile-dir")
    lora_path: str | None = setting(None, "an adapter that all prompts are computed with; it turns --enable-lora on")

    def __post_init__(self) -> None:
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups must be at least 0, not {self.num_warmups}")


def command_line() -> Parser:
    """The flags of the benchmark."""
    parser = Parser(prog="llmjax bench throughput", description="Time many prompts, all of them given at once.")
    add_model(parser)
    add_settings(parser, settings_of(ThroughputOptions).values(), section="run")
    add_settings(parser, settings_of(DatasetOptions).values(), section="prompts")
    add_settings(parser, settings_of(ReportOptions).values(), section="report")
    add_config_flags(parser, rows=vllm_bench.OFFLINE)
    return parser


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints its table.

    Raises:
        LLMJaxError: a setting is wrong, or the model cannot be loaded.
    """
    values = command_line().parse(argv)
    options, report = options_of(DatasetOptions, values), options_of(ReportOptions, values)
    way = options_of(ThroughputOptions, values)
    if options.random_batch_size > 1 or options.dataset_name == "random-rerank":
        raise ConfigError("--random-batch-size and --dataset-name random-rerank: llmjax bench serve measures vectors")
    if options.dataset_name == "random-mm":
        raise ConfigError("--dataset-name random-mm: llmjax bench vision and llmjax bench serve measure pictures")
    check_writable(report.output_json, plot=report.plot, compare=report.compare)
    config = configs_of(values, model=values.positional_model).engine
    if way.lora_path is not None:
        config = config.replace(enable_lora=True)
    from llmjax import LLM

    llm = LLM.from_config(config)

    def count_tokens(text: str) -> int:
        if llm.tokenizer is None:
            raise ConfigError("a data set of texts needs a tokenizer: leave out --skip-tokenizer-init")
        return len(llm.tokenizer.encode(text))

    samples = options.samples(
        seed=config.seed, count_tokens=count_tokens, vocab_size=llm.info.vocab_size, extra=way.num_warmups
    )
    timed, warm_up = samples[: len(samples) - way.num_warmups], samples[len(samples) - way.num_warmups :]
    llm.warm_up()
    adapters = _adapters(llm, way.lora_path)
    run(llm, warm_up, adapters)
    before = work_of(llm.stats)
    if way.profile:
        llm.start_profile()
    outputs = run(llm, timed, adapters)
    if way.profile:
        llm.stop_profile()
    result = summarize_outputs(outputs, work_of(llm.stats) - before, percentiles=report.metric_percentiles)
    title = f"{llm.model_name}: {len(timed)} {options.dataset_name} prompts"
    setup = {"benchmark": "throughput", "model": llm.model_name, **as_setup(options), **_totals(llm.model_name, result)}
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


def _totals(model: str, result: Result) -> dict[str, Any]:
    """The JSON fields of vLLM's throughput benchmark."""
    return {
        "model_id": model,
        "elapsed_time": result.duration,
        "num_requests": result.completed,
        "total_num_tokens": result.total_input_tokens + result.total_output_tokens,
        "requests_per_second": result.request_throughput,
        "tokens_per_second": result.total_token_throughput,
    }


def _adapters(llm: LLM, path: str | None) -> list[LoRARequest]:
    """The adapters that prompts take in turn: the one of ``path``, or those of the settings."""
    if path is not None:
        return [LoRARequest("adapter", llm.adapters.new_number(), path)]
    listed = [adapter.reference for adapter in llm.adapters.listed]
    return [LoRARequest(one.name, one.number, one.path) for one in listed]


def run(llm: LLM, samples: list[Sample], adapters: Sequence[LoRARequest] = ()) -> list[RequestOutput]:
    """Answers all samples, greedily and at exactly their lengths.

    Args:
        adapters: samples take them in turn.
    """
    params = [sampling(sample, llm) for sample in samples]
    chosen = [adapters[number % len(adapters)] for number in range(len(samples))] if adapters else None
    return llm.generate([sample.prompt for sample in samples], params, use_tqdm=False, lora_request=chosen)


def summarize_outputs(outputs: list[RequestOutput], work: EngineWork, *, percentiles: Sequence[float]) -> Result:
    """The figures of finished requests, from the times that the engine noted (ITL is not among them).

    Raises:
        ConfigError: the engine noted no times.
    """
    records = []
    for output in outputs:
        metrics = output.metrics
        if metrics is None or metrics.finished_time is None:
            raise ConfigError(f"request {output.request_id} came back without its times")
        records.append(
            RequestRecord(
                start=metrics.arrival_time,
                first_token=metrics.first_token_time,
                end=metrics.finished_time,
                prompt_tokens=len(output.prompt_token_ids),
                output_tokens=sum(len(completion.token_ids) for completion in output.outputs),
                text=output.outputs[0].text,
            )
        )
    return summarize(records, percentiles=percentiles, work=work)
