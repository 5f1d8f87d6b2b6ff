"""Where the time of a step goes on a CPU: products, attention, waits, what XLA and the host do beside them.

    python -m benchmarks.step_time --model model.gguf [--streams 1,4,16,32] [--context 128] [--prompt 512]

Columns are milliseconds of a step, from one step's tokens to the next one's. What the C++ kernels compute is the time
of all threads over their number: what it would take if no thread waited for another. `waits` is the rest of the time
that a step spends in calls of the kernels, `outside` what it spends elsewhere: XLA's own operations, dispatch, and
the host where it is the slower one. `kernels` is the share of the step that the kernels' own work makes up. The
host's CPU time goes on beside the device and so is part of no sum. Flags that set the engine are passed on.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import this_machine
from llmjax.bench.options import options_of
from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.config import EngineConfig, check_values, setting
from llmjax.engine.build import build_engine
from llmjax.engine.core.engine import Engine
from llmjax.engine.core.request import EngineRequest
from llmjax.engine.core.stats import RequestStats, StepStats
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.kernels.cpu.recording import WORK, Recording, recorded
from llmjax.sampling.params import SamplingParams
from llmjax.settings import settings_of

STARTING = 64  # steps of a run before it is recorded: dispatches get longer at the beginning


@dataclass(frozen=True, kw_only=True)
class StepTimeOptions:
    """What is measured."""

    streams: Sequence[int] = setting((1, 4, 16, 32), "streams that decode together", section="step")
    context: int = setting(128, "tokens of each stream's prompt", section="step")
    prompt: int = setting(512, "tokens of a prompt that is computed alone; 0: none", section="step")
    steps: int = setting(100, "steps that are recorded", section="step")
    runs: int = setting(3, "measurements of each line; the fastest counts", section="step")

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("context", "steps", "runs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class Line:
    """Seconds of one step."""

    name: str
    wall: float
    busy: dict[str, float]  # by WORK, over the number of threads
    calling: float  # in calls of the kernels
    host: float  # CPU time of the engine's thread
    calls: float
    phases: float

    @property
    def computed(self) -> float:
        return sum(self.busy.values())


@dataclass
class _Steps:
    """A ``StatLogger`` that keeps dispatches."""

    seen: list[StepStats] = field(default_factory=list)

    def decoded(self, streams: int) -> int:
        """Steps in which all streams got a token."""
        return sum(s.num_steps for s in self.seen if s.num_generation_tokens == streams * s.num_steps)

    def record_step(self, stats: StepStats) -> None:
        self.seen.append(stats)

    def record_request(self, stats: RequestStats) -> None: ...

    def record_rejection(self, reason: str) -> None: ...


def main(argv: list[str]) -> int:
    """Measures and prints the table.

    Raises:
        LLMJaxError: a setting is wrong.
    """
    parser = Parser(prog="python -m benchmarks.step_time", description="Where the time of a step goes on a CPU.")
    add_settings(parser, settings_of(StepTimeOptions).values(), section="step")
    add_config_flags(parser)
    values = parser.parse(argv)
    options = options_of(StepTimeOptions, values)
    config = engine_config(configs_of(values).engine, options)
    engine = build_engine(config)
    try:
        engine.runner.warm_up()
        lines = [decode_line(engine, streams, options) for streams in options.streams]
        if options.prompt:
            lines.append(prompt_line(engine, options))
    finally:
        engine.close()
    Console(width=160).print(table_of(lines, config))
    return 0


def engine_config(config: EngineConfig, options: StepTimeOptions) -> EngineConfig:
    """The user's settings, with room for what is measured."""
    length = max(options.context + options.steps + 2 * STARTING, options.prompt + 8)
    return config.with_room(tokens=max(options.prompt, *options.streams, 1)).replace(
        skip_tokenizer_init=True,
        max_num_seqs=max(*options.streams, 1),
        max_model_len=length,
        enable_prefix_caching=False,
        auto_speculation=False,  # a step is of one token a stream
    )


def decode_line(engine: Engine, streams: int, options: StepTimeOptions) -> Line:
    """The fastest run of steps in which all streams decode."""
    new = options.steps + 2 * STARTING
    lines = []
    for run in range(options.runs):
        _add(engine, streams, options.context, new, seed=run)
        steps = _Steps()
        engine.loggers.append(steps)
        _step_until_decoded(engine, steps, streams, STARTING)
        steps.seen.clear()
        gc.collect()
        with recorded() as recording:
            _step_until_decoded(engine, steps, streams, options.steps)
        lines.append(_line(f"{streams} streams", steps.seen, recording))
        while not engine.idle:
            engine.step()
        engine.loggers.remove(steps)
    return min(lines, key=lambda line: line.wall)


def _step_until_decoded(engine: Engine, steps: _Steps, streams: int, count: int) -> None:
    """Steps until all streams got a token `count` times.

    Raises:
        LLMJaxError: they end before that, such as with settings that make several tokens a step.
    """
    while steps.decoded(streams) < count:
        if engine.idle:
            done = steps.decoded(streams)
            raise LLMJaxError(f"{streams} streams ended after {done} of {count} steps of one token each")
        engine.step()


def prompt_line(engine: Engine, options: StepTimeOptions) -> Line:
    """The fastest step of a prompt."""
    lines = []
    for run in range(3 * options.runs):
        steps = _Steps()
        engine.loggers.append(steps)
        with recorded() as recording:
            _add(engine, 1, options.prompt, 1, seed=run)
            while not engine.idle:
                engine.step()
        lines.append(_line(f"prompt of {options.prompt}", [s for s in steps.seen if s.num_prompt_tokens], recording))
        engine.loggers.remove(steps)
    return min(lines, key=lambda line: line.wall)


def _add(engine: Engine, streams: int, length: int, new: int, *, seed: int) -> None:
    random = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    for _ in range(streams):
        request = EngineRequest(
            request_id=int(random.integers(1 << 62)),
            prompt_token_ids=random.integers(1, engine.model.config.vocab_size, length).tolist(),
            params=params,
            max_tokens=new,
            stop_token_ids=frozenset(),
        )
        engine.add(request)


def _line(name: str, seen: Sequence[StepStats], recording: Recording) -> Line:
    steps = sum(stats.num_steps for stats in seen)
    threads = usable_cores()
    return Line(
        name=name,
        wall=sum(stats.step_seconds for stats in seen) / steps,
        busy={work: recording.busy[work] / threads / steps for work in WORK},
        calling=recording.calling / steps,
        host=sum(stats.host.total for stats in seen) / steps,
        calls=recording.calls / steps,
        phases=recording.phases / steps,
    )


def table_of(lines: Sequence[Line], config: EngineConfig) -> Table:
    """A row a line, and a column for each kind of work that some line has."""
    shown = [work for work in WORK if any(line.busy[work] > 1e-6 for line in lines)]
    date = datetime.now(UTC).date().isoformat()
    title = f"ms of a step; {config.model}; {this_machine()}; {date}"
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    table.add_column("")
    for column in ("step", *shown, "waits", "outside", "kernels", "host", "calls", "phases"):
        table.add_column(column, justify="right")
    for line in lines:
        times = [
            line.wall,
            *(line.busy[work] for work in shown),
            line.calling - line.computed,
            line.wall - line.calling,
        ]
        table.add_row(
            line.name,
            *(f"{1e3 * seconds:.2f}" for seconds in times),
            f"{line.computed / line.wall:.0%}",
            f"{1e3 * line.host:.2f}",
            f"{line.calls:.0f}",
            f"{line.phases:.0f}",
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"step_time: error: {error}")
