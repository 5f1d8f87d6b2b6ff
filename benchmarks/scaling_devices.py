"""What several engines and several devices of one machine bring: output tokens a second of each arrangement, measured
in turn, against the simplest one.

    python -m benchmarks.scaling_devices [MODEL] [--shape 135m] [--streams 16] [--devices 1,2,3] [flags of the engine]

Data parallel: one engine with all threads against two with half of them each, and what each way from an engine to its
user costs a token; and one such half by itself, for where a step takes as long with half of the rows, two engines read
the weights twice for as many tokens, whatever divides them. Tensor parallel: one device against several in one process,
which on a CPU share the same cores, so that nothing can be gained and the ratio is what dividing costs; from that cost
and from what the machine reads follows what eight devices with memory of their own would bring. Every engine but one is
in a process of its own, and idle while another is measured. The fastest of --rounds counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.link_model import TELL_MICROSECONDS, LinkModel, read_bytes_per_second, seconds_of_sum, tell_seconds
from benchmarks.machine import this_machine
from benchmarks.random_model import SHAPES, write_random_model
from benchmarks.scaling import step_seconds
from llmjax import AsyncLLM, SamplingParams
from llmjax.bench.dataset import RandomShape, random_samples
from llmjax.bench.options import options_of
from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_config_flags, add_model, add_settings, configs_of
from llmjax.config import EngineConfig, setting
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.outputs import RequestOutput
from llmjax.sampling.params import RequestOutputKind
from llmjax.settings import settings_of

ENGINES = 2  # of the data-parallel arrangement
TWO_ENGINES = 0.95  # of one engine with the same threads, at least
FRONT_MS = 0.3  # that a front adds to a token, at most
MANY = 8  # devices that the model of link and compute is asked about
TENSOR_PARALLEL = {2: 0.65, 3: 0.5}  # of one device, at least


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """What is measured."""

    shape: str | None = setting(
        None, "random weights of this shape instead of a model", choices=tuple(SHAPES), section="measurements"
    )
    streams: int = setting(16, "requests at once")
    prompt: int = setting(32, "tokens of each prompt")
    new_tokens: int = setting(64, "tokens that each request generates")
    rounds: int = setting(5, "measurements of each arrangement; the fastest counts")
    devices: Sequence[int] = setting((1, 2, 3), "tensor parallel: numbers of devices; 0: none of this part")
    work_dir: str = setting(str(Path(tempfile.gettempdir()) / "llmjax-scaling"), "folder for random weights")
    output_json: str | None = setting(None, "file for all figures as JSON")

    def __post_init__(self) -> None:
        for name, low in (("streams", ENGINES), ("prompt", 1), ("new_tokens", 2), ("rounds", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, not {getattr(self, name)}")
        if any(count < 0 for count in self.devices) or (any(self.devices) and 1 not in self.devices):
            raise ConfigError("--devices: others are compared with 1, so it must be there")

    @property
    def counts(self) -> list[int]:
        """Numbers of devices."""
        return sorted({count for count in self.devices if count > 0})


@dataclass(frozen=True, kw_only=True)
class Figure:
    """An arrangement's figures.

    Attributes:
        rates: output tokens a second, by round.
        delay_ms: from an engine's having a token to its user's, of one stream, the median; None: not measured.
        layers: how many layers the model has.
    """

    name: str
    rates: Sequence[float]
    delay_ms: float | None = None
    layers: int = 0

    @property
    def best(self) -> float:
        return max(self.rates)


def main(argv: list[str]) -> int:
    """Measures and prints.

    Raises:
        LLMJaxError: a setting is wrong, or the model cannot be loaded.
    """
    parser = Parser(prog="python -m benchmarks.scaling_devices", description="What engines and devices bring.")
    add_model(parser)
    add_settings(parser, settings_of(DeviceOptions).values(), section="measurements")
    add_config_flags(parser)
    values = parser.parse(argv)
    options = options_of(DeviceOptions, values)
    check_writable(options.output_json)
    config = engine_config(configs_of(values, model=values.positional_model).engine, options)
    data = asyncio.run(measure(engines(config), options, delays=True))
    tensor = asyncio.run(measure(devices(config, options.counts), options))
    machine, date = this_machine(), datetime.now(UTC).date().isoformat()
    console = Console(width=140)
    title = f"{options.shape or config.model}, {options.streams} streams; {machine}; {date}"
    console.print(table_of(f"Data parallel: {title}", data))
    console.print(*data_parallel_words(data), sep="\n", highlight=False)
    if tensor:
        console.print(table_of(f"Tensor parallel: {title}", tensor))
        console.print(*tensor_parallel_words(tensor, options.counts), sep="\n", highlight=False)
        console.print(*many_devices_words(tensor, options, threads=config.threads), sep="\n", highlight=False)
    if options.output_json is not None:
        parts = {"data_parallel": data, "tensor_parallel": tensor}
        results = {part: [dataclasses.asdict(figure) for figure in figures] for part, figures in parts.items()}
        write_json(Path(options.output_json), {"date": date, "machine": dataclasses.asdict(machine), **results})
    return 0


def engine_config(config: EngineConfig, options: DeviceOptions) -> EngineConfig:
    """The user's settings, with room for all streams in one engine, and half of them in each of two."""
    changes: dict[str, object] = {
        "max_num_seqs": options.streams,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if options.shape is not None:
        folder = Path(options.work_dir) / options.shape
        write_random_model(folder, SHAPES[options.shape], max_position_embeddings=1 << 15)
        changes |= {"model": str(folder), "skip_tokenizer_init": True}
    if config.max_model_len is None:
        changes["max_model_len"] = options.prompt + options.new_tokens
    return config.with_room(tokens=options.streams).replace(**changes)


def engines(config: EngineConfig) -> dict[str, EngineConfig]:
    """One engine on a thread and in a process, two with half of its threads and streams each, and one of these two.

    Raises:
        ConfigError: there are not enough threads.
    """
    threads = config.threads or usable_cores()
    if threads < ENGINES:
        raise ConfigError(f"{ENGINES} engines need as many threads; there is {threads}")
    each = threads // ENGINES
    threads = each * ENGINES
    one = config.replace(threads=threads, data_parallel_size=1)
    several = config.replace(
        threads=threads,
        data_parallel_size=ENGINES,
        engine_process="auto",
        max_num_seqs=-(-config.max_num_seqs // ENGINES),
    )
    return {
        f"1 engine × {threads} threads, on a thread": one.replace(engine_process="thread"),
        f"1 engine × {threads} threads, in a process": one.replace(engine_process="process"),
        f"{ENGINES} engines × {each} thread{'s' * (each > 1)}": several,
        f"one of {ENGINES} engines × {each} thread{'s' * (each > 1)}": one.replace(
            threads=each, engine_process="process", max_num_seqs=several.max_num_seqs
        ),
    }


def devices(config: EngineConfig, counts: Sequence[int]) -> dict[str, EngineConfig]:
    """One engine with each number of devices."""
    one = config.replace(data_parallel_size=1, engine_process="process", device_ids=None)
    return {f"{count} device{'s' * (count > 1)}": one.replace(tensor_parallel_size=count) for count in counts}


async def measure(
    arrangements: Mapping[str, EngineConfig], options: DeviceOptions, *, delays: bool = False
) -> list[Figure]:
    """The figures of arrangements that are there at once, and measured in turn.

    Args:
        delays: measure the way of tokens too, and rates from a request to its last token; else rates of decoding alone.
    """
    log, rng = Console(stderr=True), np.random.default_rng(0)
    made: dict[str, AsyncLLM] = {}
    rates: dict[str, list[float]] = {name: [] for name in arrangements}
    waits: dict[str, list[float]] = {name: [] for name in arrangements}
    try:
        for name, config in arrangements.items():
            made[name] = AsyncLLM.from_config(config)
            await made[name].warm_up()
        for number in range(options.rounds + 1):
            for name, engine in made.items():
                shape = RandomShape(
                    input_len=options.prompt, output_len=1, vocab_size=min(10_000, engine.info.vocab_size)
                )
                streams = min(options.streams, arrangements[name].max_num_seqs * arrangements[name].data_parallel_size)
                prompts = [list(sample.prompt) for sample in random_samples(streams, shape, rng)]
                started = time.monotonic()
                outputs = await asyncio.gather(*(_generate(engine, prompt, options) for prompt in prompts))
                seconds = time.monotonic() - started
                rate = streams * options.new_tokens / seconds if delays else streams / step_seconds(outputs)
                if number:  # the first round is for what comes up only once
                    rates[name].append(rate)
                    log.print(f"{name}, round {number}: {rate:.1f} tokens/s", style="dim", highlight=False)
                    if delays:
                        waits[name] += await _delays(engine, prompts[0], options)
    finally:
        for engine in made.values():
            await engine.shutdown()
    return [
        Figure(
            name=name,
            rates=rates[name],
            delay_ms=median(waits[name]) if waits[name] else None,
            layers=made[name].info.num_layers,
        )
        for name in arrangements
    ]


async def _generate(engine: AsyncLLM, prompt: list[int], options: DeviceOptions) -> RequestOutput:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=options.new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    name = f"{id(prompt)}"
    (output,) = [output async for output in engine.generate(prompt, params, name)]
    return output


async def _delays(engine: AsyncLLM, prompt: list[int], options: DeviceOptions) -> list[float]:
    """Milliseconds between an engine's having a token and its user's, for each output of a stream."""
    params = SamplingParams(
        temperature=0.0, max_tokens=options.new_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    delays = []
    async for output in engine.generate(prompt, params, "delays"):
        if output.metrics is not None and output.metrics.last_token_time is not None:
            delays.append(1e3 * (time.monotonic() - output.metrics.last_token_time))
    return delays


def table_of(title: str, figures: Sequence[Figure]) -> Table:
    """One line an arrangement."""
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    table.add_column("arrangement")
    for column in ("tokens/s", "median", "engine to user, ms"):
        table.add_column(column, justify="right")
    for figure in figures:
        delay = "–" if figure.delay_ms is None else f"{figure.delay_ms:.2f}"
        table.add_row(figure.name, f"{figure.best:.1f}", f"{median(figure.rates):.1f}", delay)
    return table


def data_parallel_words(figures: Sequence[Figure]) -> list[str]:
    """What comes of the figures of `engines`, with what is wanted."""
    thread, process, several, half = figures
    words = [
        f"{several.name} bring {several.best / process.best:.2f} of one engine in a process (≥ {TWO_ENGINES}), and "
        f"{several.best / (ENGINES * half.best):.2f} of {ENGINES} × one of them by itself"
    ]
    if thread.delay_ms is not None and several.delay_ms is not None:
        added = several.delay_ms - thread.delay_ms
        words.append(f"a token takes {added:+.2f} ms more to its user than from an engine on a thread (≤ {FRONT_MS})")
    return words


def tensor_parallel_words(figures: Sequence[Figure], counts: Sequence[int]) -> list[str]:
    """What comes of the figures of `devices`, with what is wanted on a CPU, where devices share the cores."""
    words = []
    for count, figure in zip(counts, figures, strict=True):
        if count > 1:
            wanted = f" (≥ {TENSOR_PARALLEL[count]})" if count in TENSOR_PARALLEL else ""
            words.append(f"{figure.name} decode with {figure.best / figures[0].best:.2f} of one device's speed{wanted}")
    return words


def many_devices_words(figures: Sequence[Figure], options: DeviceOptions, *, threads: int | None) -> list[str]:
    """What a step costs a leader of other processes, and what many devices would bring."""
    tell = 1e6 * tell_seconds(options.streams)
    words = [f"a follower knows of a step of {options.streams} rows after {tell:.0f} µs (≤ {TELL_MICROSECONDS})"]
    if len(figures) > 1:
        steps = [options.streams / figure.best for figure in figures[:2]]
        model = LinkModel(
            bytes_per_second=read_bytes_per_second(threads or usable_cores()),
            sum_seconds=seconds_of_sum(steps, figures[0].layers),
        )
        words += model.words(MANY)
    return words


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"scaling_devices: error: {error}")
