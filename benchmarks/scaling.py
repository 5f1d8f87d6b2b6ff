"""How llmjax's cost grows: a decode step against streams and against context, prefill against length.

    python -m benchmarks.scaling [MODEL] [--shape 1.5b] [--streams 1,2,4,…] [--context 128,…] [--prefill 32,…]
    python -m benchmarks.scaling [MODEL] --stream-prompt 2048 --streams 1,2,4,8,16,32,64 --context 1024,…,32768

The points of a sweep take turns, --runs times; there are medians beside the best. A decode step is the time between a
request's first and last token over the steps between them; all streams start in one step, so that every step has all of
them, and the pages of their prompts are there before. `one more` is what a step grows by from the line above for each
stream or token of context: where cost is linear, it is the same in all lines. Flags that set the engine (--dtype,
--kv-cache-dtype, …) are passed on.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from benchmarks.machine import this_machine
from benchmarks.plot import Line, draw
from benchmarks.random_model import SHAPES, write_random_model
from llmjax import LLM, SamplingParams
from llmjax.bench.dataset import RandomShape, random_samples
from llmjax.bench.options import options_of
from llmjax.bench.pyplot import check_plot
from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_config_flags, add_model, add_settings, configs_of
from llmjax.config import EngineConfig, setting
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.outputs import RequestOutput
from llmjax.settings import settings_of


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """What is swept."""

    shape: str | None = setting(
        None, "random weights of this shape instead of a model", choices=tuple(SHAPES), section="sweeps"
    )
    streams: Sequence[int] = setting((1, 2, 4, 8, 16, 32, 64), "decode: streams at once; 0: none of this sweep")
    stream_prompt: int = setting(8, "tokens of each of their prompts")
    context: Sequence[int] = setting((128, 256, 512, 1024, 2048, 4096, 8192), "decode of one stream: tokens at its end")
    prefill: Sequence[int] = setting((32, 64, 128, 256, 512, 1024, 2048, 4096), "prefill: tokens of the prompt")
    new_tokens: int = setting(32, "tokens that a decode measurement makes in each stream")
    runs: int = setting(3, "measurements of each figure, in turns")
    work_dir: str = setting(str(Path(tempfile.gettempdir()) / "llmjax-scaling"), "folder for random weights")
    output_json: str | None = setting(None, "file for all figures as JSON")
    plot: str | None = setting(None, "picture file of the figures; needs matplotlib")

    def __post_init__(self) -> None:
        if self.shape is not None and self.shape not in SHAPES:
            raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, not {self.shape}")
        for name, low in (("new_tokens", 2), ("runs", 1), ("stream_prompt", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, not {getattr(self, name)}")
        if any(length <= self.new_tokens for length in self.counts("context")):
            raise ConfigError(f"--context: every length must be above the {self.new_tokens} of --new-tokens")

    def counts(self, name: str) -> list[int]:
        """The values of a sweep; 0 alone is an empty one."""
        return [value for value in getattr(self, name) if value > 0]

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        prefill = (length + 1 for length in self.counts("prefill"))
        return max([self.stream_prompt + self.new_tokens, *self.counts("context"), *prefill])


@dataclass(frozen=True)
class Measurement:
    """One figure: a step or a prefill that computes ``tokens``."""

    x: int
    seconds: float  # the best
    median: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Sweep:
    """The figures of one table."""

    title: str
    x_label: str
    measurements: list[Measurement]
    decode: bool


def main(argv: list[str]) -> int:
    """Runs the sweeps and prints their tables.

    Raises:
        LLMJaxError: a setting is wrong, or the model cannot be loaded.
    """
    parser = Parser(prog="python -m benchmarks.scaling", description="How the cost of a step grows.")
    add_model(parser)
    add_settings(parser, settings_of(ScalingOptions).values(), section="sweeps")
    add_config_flags(parser)
    values = parser.parse(argv)
    options = options_of(ScalingOptions, values)
    check_writable(options.output_json)
    check_plot(options.plot)
    config = engine_config(configs_of(values, model=values.positional_model).engine, options)
    llm = LLM.from_config(config)
    try:
        llm.warm_up()
        sweeps = [sweep for sweep in measure(llm, options) if sweep.measurements]
    finally:
        llm.close()
    weights = bytes_of_weights(llm)
    report(sweeps, model=options.shape or llm.model_name, weight_bytes=weights, options=options)
    return 0


def engine_config(config: EngineConfig, options: ScalingOptions) -> EngineConfig:
    """The user's settings, with room for the longest request and for all streams to start in one step."""
    streams = max(options.counts("streams"), default=1)
    if options.counts("streams"):
        config = config.replace(max_num_seqs=streams)
    # Of a prompt whose pages are there a page is computed at most.
    config = config.with_room(tokens=streams * min(options.stream_prompt, config.page_size))
    changes: dict[str, object] = {"max_model_len": options.longest, "enable_prefix_caching": True}
    if options.shape is not None:
        folder = Path(options.work_dir) / options.shape
        write_random_model(folder, SHAPES[options.shape], max_position_embeddings=1 << 20)
        changes |= {"model": str(folder), "skip_tokenizer_init": True}
    return config.replace(**changes)


def measure(llm: LLM, options: ScalingOptions) -> list[Sweep]:
    """All sweeps; a line on standard error tells of each figure."""
    log = Console(stderr=True)
    rng = np.random.default_rng(0)
    new = options.new_tokens

    def prompts(streams: int, length: int) -> list[list[int]]:
        shape = RandomShape(input_len=length, output_len=1, vocab_size=min(10_000, llm.info.vocab_size))
        return [list(sample.prompt) for sample in random_samples(streams, shape, rng)]

    def decoded(prompts: list[list[int]]) -> float:
        _generate(llm, prompts, 1)  # computes the pages, which other prompts may have taken
        outputs = _generate(llm, prompts, new)
        refuse_evicted(outputs, len(prompts[0]) - 1, page_size=llm.engine.config.page_size)
        return step_seconds(outputs)

    def sweep(title: str, x_label: str, measures: Mapping[int, tuple[int, Callable[[], float]]], decode: bool) -> Sweep:
        """``measures``: by x, the tokens that are computed, and what measures the seconds."""
        rates: dict[int, list[float]] = {x: [] for x in measures}
        for number in range(options.runs + decode):  # the first one warms up
            for x, (_, measure) in measures.items():
                seconds = measure()
                if number >= decode:
                    rates[x].append(seconds)
                    log.print(f"{x_label} {x}: {seconds * 1e3:.2f} ms", style="dim", highlight=False)
        measurements = [
            Measurement(x, min(seconds), statistics.median(seconds), measures[x][0]) for x, seconds in rates.items()
        ]
        return Sweep(title, x_label, measurements, decode)

    return [
        sweep(
            f"decode after {options.stream_prompt} tokens",
            "streams",
            {n: (n, partial(decoded, prompts(n, options.stream_prompt))) for n in options.counts("streams")},
            decode=True,
        ),
        sweep(
            "decode of one stream",
            "context",
            {n: (1, partial(decoded, prompts(1, n - new))) for n in options.counts("context")},
            decode=True,
        ),
        sweep(
            "prefill",
            "prompt",
            {
                n: (n, lambda n=n: first_token_seconds(_generate(llm, prompts(1, n), 1)[0]))  # type: ignore[misc]
                for n in options.counts("prefill")
            },
            decode=False,
        ),
    ]


def _generate(llm: LLM, prompts: Sequence[list[int]], new_tokens: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    return llm.generate(list(prompts), params, use_tqdm=False)


def step_seconds(outputs: Sequence[RequestOutput]) -> float:
    """Seconds of a decode step, from the times that the engine noted for requests that ran side by side."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    firsts = [m.first_token_time for m in metrics if m.first_token_time is not None]
    lasts = [m.finished_time for m in metrics if m.finished_time is not None]
    if not len(firsts) == len(lasts) == len(outputs):
        raise ConfigError("a request came back without its times")
    return (max(lasts) - max(firsts)) / (len(outputs[0].outputs[0].token_ids) - 1)


def refuse_evicted(outputs: Sequence[RequestOutput], tokens: int, *, page_size: int) -> None:
    """Sees to it that the pages of all prompts were there when their steps were measured.

    Args:
        tokens: how many tokens of each prompt were computed before.

    Raises:
        ConfigError: some were computed again.
    """
    if evicted := sum(output.num_cached_tokens < tokens // page_size * page_size for output in outputs):
        raise ConfigError(
            f"the pages of {evicted} of {len(outputs)} prompts were evicted: they need more --kv-cache-memory-bytes, "
            f"and prefix caching"
        )


def first_token_seconds(output: RequestOutput) -> float:
    """Seconds from a request's arrival to its first token."""
    metrics = output.metrics
    if metrics is None or metrics.first_token_time is None:
        raise ConfigError(f"request {output.request_id} came back without its times")
    return metrics.first_token_time - metrics.arrival_time


def bytes_of_weights(llm: LLM) -> int:
    """Bytes that a decode step reads of the weights as they lie in memory."""
    params = llm.engine.model.params
    untied = any(name.startswith("lm_head") for name in params)
    read = {name: value for name, value in params.items() if not (untied and name.startswith("model.embed_tokens"))}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def report(sweeps: Sequence[Sweep], *, model: str, weight_bytes: int, options: ScalingOptions) -> None:
    """Prints the tables and writes the files that are asked for.

    Raises:
        ConfigError: a file cannot be written.
    """
    console, machine, date = Console(), this_machine(), datetime.now(UTC).date().isoformat()
    title = f"{model}, {weight_bytes / 1e6:.1f} MB of weights in memory"
    console.print(f"{title}; {machine}; {date}", highlight=False)
    for sweep in sweeps:
        console.print()
        console.print(_table(sweep, weight_bytes))
    if options.output_json is not None:
        content = {
            "date": date,
            "model": model,
            "weight_bytes": weight_bytes,
            "machine": dataclasses.asdict(machine),
            "sweeps": [dataclasses.asdict(sweep) for sweep in sweeps],
        }
        write_json(Path(options.output_json), content)
    if options.plot is not None:
        draw([_panel(sweep) for sweep in sweeps], title=title, path=options.plot)


def _table(sweep: Sweep, weight_bytes: int) -> Table:
    """A row a figure, with a bar for the time of a step or for the speed of a prefill."""
    table = Table(title=sweep.title, title_justify="left", box=box.MARKDOWN)
    table.add_column(sweep.x_label, justify="right")
    table.add_column("median ms" + " a step" * sweep.decode, justify="right")
    table.add_column("best", justify="right")
    table.add_column("tok/s", justify="right")
    if sweep.decode:
        table.add_column("one more, µs", justify="right")
        table.add_column("weights, GB/s", justify="right")
    table.add_column("ms a step" if sweep.decode else "tok/s", min_width=24)
    lengths = [m.seconds if sweep.decode else m.tokens_per_second for m in sweep.measurements]
    before: Measurement | None = None
    for measurement, length in zip(sweep.measurements, lengths, strict=True):
        milliseconds = [f"{seconds * 1e3:.2f}" for seconds in (measurement.median, measurement.seconds)]
        cells = [str(measurement.x), *milliseconds, f"{measurement.tokens_per_second:,.0f}"]
        if sweep.decode:
            cells.append("" if before is None else f"{1e6 * _slope(before, measurement):,.2f}")
            cells.append(f"{weight_bytes / measurement.seconds / 1e9:.1f}")
        before = measurement
        table.add_row(*cells, ProgressBar(total=max(lengths), completed=length, width=24))
    return table


def _slope(before: Measurement, after: Measurement) -> float:
    """Seconds for one more."""
    return (after.seconds - before.seconds) / max(1, after.x - before.x)


def _panel(sweep: Sweep) -> Line:
    x = [float(m.x) for m in sweep.measurements]
    if sweep.decode:
        y = [m.seconds * 1e3 for m in sweep.measurements]
        return Line(sweep.title, sweep.x_label, "ms a step", x, y)
    return Line(sweep.title, sweep.x_label, "tokens/s", x, [m.tokens_per_second for m in sweep.measurements])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"scaling: error: {error}")
