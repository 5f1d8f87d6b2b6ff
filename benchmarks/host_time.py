"""What the host does for a decode step while the device computes: CPU time of the engine's thread, by what it did.

    python -m benchmarks.host_time [--shape least] [--points 16x32,256x32768] [--steps 1,8] [--runs 3]

The model has random weights and is the smallest, so that there is little beside the host's own time; a larger
``--shape`` shows what more weights cost. A point is a number of streams after a number of tokens. All have one prompt,
which is computed once: their page tables are full without a cache of terabytes. Flags that set the engine (--page-size,
--kv-cache-dtype, …) are passed on. ``--evict-mib 256`` has short contexts measured as if each step read many gigabytes
of keys and values with the host's own cores.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import this_machine
from benchmarks.random_model import SHAPES, write_random_model
from llmjax.bench.options import options_of
from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.config import EngineConfig, check_values, setting
from llmjax.engine.build import build_engine
from llmjax.engine.core.engine import Engine
from llmjax.engine.core.request import EngineRequest
from llmjax.engine.core.stats import HostTime, RequestStats, StepStats
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.sampling.params import SamplingParams
from llmjax.settings import settings_of

PARTS = tuple(part.name for part in dataclasses.fields(HostTime))


@dataclass(frozen=True)
class Point:
    """Streams, and tokens of each when the measurement begins."""

    streams: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Point:
        """From ``STREAMSxCONTEXT``.

        Raises:
            ConfigError: it is something else.
        """
        streams, _, context = text.partition("x")
        if not (streams.isdecimal() and context.isdecimal() and int(streams) and int(context) > 1):
            raise ConfigError(f"--points: {text!r} is not STREAMSxCONTEXT, such as 16x32")
        return cls(int(streams), int(context))


@dataclass(frozen=True, kw_only=True)
class HostTimeOptions:
    """What is measured."""

    shape: str = setting("least", "random weights of this shape", choices=tuple(SHAPES), section="host")
    points: Sequence[str] = setting(("16x32", "256x32768"), "STREAMSxCONTEXT: streams, tokens of each")
    steps: Sequence[int] = setting((1, 8), "decode steps that a dispatch takes at most")
    dispatches: int = setting(32, "dispatches that are measured")
    runs: int = setting(3, "measurements of each figure; the fastest counts")
    evict_mib: int = setting(0, "MiB that are read between dispatches, so that the host's data leave the caches")
    work_dir: str = setting(str(Path(tempfile.gettempdir()) / "llmjax-scaling"), "folder for random weights")
    output_json: str | None = setting(None, "file for all figures as JSON")

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("dispatches", "runs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if self.evict_mib < 0:
            raise ConfigError(f"--evict-mib must not be negative, and is {self.evict_mib}")
        if any(steps < 1 for steps in self.steps):
            raise ConfigError(f"--steps must be at least 1 each, not {min(self.steps)}")
        for point in self.points:
            Point.parse(point)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The host's mean for a dispatch of ``steps`` decode steps (a mean too) of every stream."""

    point: Point
    steps: float
    host: HostTime  # seconds
    step_seconds: float  # from one step's tokens to the next one's

    @property
    def per_step(self) -> float:
        """Seconds of the host for a step."""
        return self.host.total / self.steps


@dataclass
class _Dispatches:
    """A ``StatLogger`` that keeps the dispatches in which all streams decode."""

    streams: int
    seen: list[StepStats] = field(default_factory=list)

    def record_step(self, stats: StepStats) -> None:
        if stats.num_running == self.streams and stats.num_generation_tokens == self.streams * stats.num_steps:
            self.seen.append(stats)

    def record_request(self, stats: RequestStats) -> None: ...

    def record_rejection(self, reason: str) -> None: ...


def main(argv: list[str]) -> int:
    """Measures and prints the table.

    Raises:
        LLMJaxError: a setting is wrong.
    """
    parser = Parser(prog="python -m benchmarks.host_time", description="The host's time for a decode step.")
    add_settings(parser, settings_of(HostTimeOptions).values(), section="host")
    add_config_flags(parser)
    values = parser.parse(argv)
    options = options_of(HostTimeOptions, values)
    check_writable(options.output_json)
    folder = Path(options.work_dir) / options.shape
    write_random_model(folder, SHAPES[options.shape], max_position_embeddings=1 << 20)
    base = configs_of(values, model=str(folder)).engine
    figures = [
        measure(engine_config(base, point, options, steps=steps), point, options)
        for point in map(Point.parse, options.points)
        for steps in options.steps
    ]
    report(figures, options)
    return 0


def engine_config(config: EngineConfig, point: Point, options: HostTimeOptions, *, steps: int) -> EngineConfig:
    """The user's settings, with room for the point's streams."""
    return config.with_room(tokens=point.streams).replace(
        skip_tokenizer_init=True,
        max_num_seqs=point.streams,
        max_model_len=point.context + new_tokens(options, steps),
        decode_steps=steps,
        enable_prefix_caching=True,
    )


def new_tokens(options: HostTimeOptions, steps: int) -> int:
    """New tokens of each stream: those measured, and those before dispatches reach their full length."""
    return (options.dispatches + 4) * steps + 8


def measure(config: EngineConfig, point: Point, options: HostTimeOptions) -> Figure:
    """The fastest of some runs."""
    log = Console(stderr=True)
    engine = build_engine(config)
    try:
        engine.runner.warm_up()
        steps = config.decode_steps or 1
        figures = [_run(engine, point, number, steps, options) for number in range(options.runs)]
    finally:
        engine.close()
    best = min(figures, key=lambda figure: figure.per_step)
    log.print(f"{point} by {best.steps:.1f}: {best.per_step * 1e3:.3f} ms a step", style="dim", highlight=False)
    return best


def _run(engine: Engine, point: Point, number: int, steps: int, options: HostTimeOptions) -> Figure:
    """One measurement, of dispatches of at most ``steps`` steps; ``number`` makes its requests' ids its own."""
    dispatches, count = _Dispatches(point.streams), new_tokens(options, steps)
    evicting = np.ones(options.evict_mib << 17)  # of 8 bytes each
    engine.loggers.append(dispatches)
    prompt = np.random.default_rng(0).integers(1, engine.model.config.vocab_size, point.context).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    gc.collect()
    for stream in range(point.streams):
        request = EngineRequest(
            request_id=number * point.streams + stream,
            prompt_token_ids=list(prompt),
            params=params,
            max_tokens=count,
            stop_token_ids=frozenset(),
        )
        engine.add(request)
    while not engine.idle:
        evicting.sum()
        engine.step()
    engine.loggers.remove(dispatches)
    longest = max(stats.num_steps for stats in dispatches.seen)
    # Dispatches get longer at the beginning.
    first = next(i for i, stats in enumerate(dispatches.seen) if stats.num_steps == longest)
    seen = dispatches.seen[first:]
    taken = sum(stats.num_steps for stats in seen)
    total = sum((stats.host for stats in seen), HostTime())
    host = HostTime(**{part: getattr(total, part) / len(seen) for part in PARTS})
    seconds = sum(stats.step_seconds for stats in seen) / taken
    return Figure(point=point, steps=taken / len(seen), host=host, step_seconds=seconds)


def report(figures: Sequence[Figure], options: HostTimeOptions) -> None:
    """Prints the table and writes the file that is asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    machine, date = this_machine(), datetime.now(UTC).date().isoformat()
    table = Table(title=f"host time; {options.shape} model; {machine}; {date}", title_justify="left", box=box.MARKDOWN)
    for column in ("streams", "context", "steps a dispatch", *(f"{part}, ms" for part in PARTS)):
        table.add_column(column, justify="right")
    for column in ("ms a dispatch", "ms a step", "whole step, ms"):
        table.add_column(column, justify="right")
    for figure in figures:
        parts = [getattr(figure.host, part) for part in PARTS]
        times = [*parts, figure.host.total, figure.per_step, figure.step_seconds]
        table.add_row(
            f"{figure.point.streams}",
            f"{figure.point.context:,}",
            f"{figure.steps:.1f}",
            *(f"{1e3 * seconds:.3f}" for seconds in times),
        )
    Console(width=160).print(table)
    if options.output_json is not None:
        content = {
            "date": date,
            "machine": dataclasses.asdict(machine),
            "shape": options.shape,
            "figures": [{**dataclasses.asdict(figure), "host_per_step": figure.per_step} for figure in figures],
        }
        write_json(Path(options.output_json), content)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"host_time: error: {error}")
