"""``llmjax bench throughput``: many prompts at once through the engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmjax.bench.dataset import Sample
from llmjax.bench.latency import sampling, work_of
from llmjax.bench.metrics import EngineWork, RequestRecord, Result, summarize
from llmjax.bench.options import DatasetOptions, ReportOptions, as_setup, options_of
from llmjax.bench.report import check_writable, publish
from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.errors import ConfigError
from llmjax.outputs import RequestOutput
from llmjax.settings import settings_of

if TYPE_CHECKING:
    from llmjax import LLM

WARM_UP = 4  # requests before the clock starts


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints its table.

    Raises:
        LLMJaxError: a setting is wrong, or the model cannot be loaded.
    """
    parser = Parser(prog="llmjax bench throughput", description="Time many prompts, all of them given at once.")
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    add_settings(parser, settings_of(DatasetOptions).values(), section="prompts")
    add_settings(parser, settings_of(ReportOptions).values(), section="report")
    add_config_flags(parser)
    values = parser.parse(argv)
    options, report = options_of(DatasetOptions, values), options_of(ReportOptions, values)
    check_writable(report.output_json)
    config = configs_of(values, model=values.positional_model).engine
    from llmjax import LLM

    llm = LLM.from_config(config)

    def count_tokens(text: str) -> int:
        if llm.tokenizer is None:
            raise ConfigError("a data set of texts needs a tokenizer: leave out --skip-tokenizer-init")
        return len(llm.tokenizer.encode(text))

    samples = options.samples(
        seed=config.seed, count_tokens=count_tokens, vocab_size=llm.info.vocab_size, extra=WARM_UP
    )
    timed, warm_up = samples[: options.num_prompts], samples[options.num_prompts :]
    llm.warm_up()
    run(llm, warm_up)
    before = work_of(llm.stats)
    outputs = run(llm, timed)
    result = summarize_outputs(outputs, work_of(llm.stats) - before, percentiles=report.metric_percentiles)
    title = f"{llm.model_name}: {options.num_prompts} {options.dataset_name} prompts"
    setup = {"benchmark": "throughput", "model": llm.model_name, **as_setup(options)}
    publish(result, title=title, output_json=report.output_json, setup=setup, detailed=report.save_detailed)
    return 0


def run(llm: LLM, samples: list[Sample]) -> list[RequestOutput]:
    """Answers all samples, greedily and at exactly their lengths."""
    params = [sampling(sample, llm) for sample in samples]
    return llm.generate([sample.prompt for sample in samples], params, use_tqdm=False)


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
