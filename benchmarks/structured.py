"""What a demanded form costs: computing time for each token, with and without one, in turns.

    python -m benchmarks.structured [--config smollm2] [--streams 1,8] [--rounds 12] [--tokens 128]

One of the streams has a form, the others write freely; beside it, all write freely. ``any text`` allows everything, so
that tokens are those of free text and the difference is what masks cost; ``JSON`` is a schema, most of whose characters
are the model's own; ``forced JSON`` one with long names, which is mostly the grammar's. The runs take turns, so that
what else the machine does meets all of them alike, and the median of the rounds' ratios counts. Engine flags are passed
on.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import this_machine
from llmjax.bench.options import options_of
from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.config import setting
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.llm import LLM
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.structured import StructuredOutputsParams
from llmjax.settings import settings_of

PROMPT = "People of the town, and their stories:\n"
PERSON = {"name": {"type": "string", "minLength": 20}, "story": {"type": "string", "minLength": 80}}
NAMES = ("identification_number", "date_of_the_first_registration", "preferred_language_of_correspondence")
FORMS: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "any text": {"regex": r"(?s:.*)\x01"},  # which the model does not write, so that the text does not end
    "JSON": {
        "json": {
            "type": "array",
            "minItems": 99,
            "items": {"type": "object", "properties": PERSON, "required": list(PERSON)},
        }
    },
    "forced JSON": {
        "json": {
            "type": "array",
            "minItems": 99,
            "items": {
                "type": "object",
                "properties": {name: {"type": "integer", "maximum": 9, "minimum": 0} for name in NAMES},
                "required": list(NAMES),
                "additionalProperties": False,
            },
        },
        "disable_any_whitespace": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class StructuredOptions:
    """What is measured."""

    streams: Sequence[int] = setting((1, 8), "streams, of which one has a form", section="structured")
    forms: Sequence[str] = setting(tuple(FORMS)[1:], "forms that are compared with none")
    rounds: int = setting(12, "runs of each, in turns")
    tokens: int = setting(128, "of each stream")
    output_json: str | None = setting(None, "file for all figures as JSON")

    def __post_init__(self) -> None:
        for name in ("rounds", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if any(streams < 1 for streams in self.streams):
            raise ConfigError(f"--streams must be at least 1 each, not {min(self.streams)}")
        if unknown := set(self.forms) - set(FORMS):
            raise ConfigError(f"--forms: {min(unknown)!r} is none of {', '.join(FORMS)}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One batch. Seconds for each of its tokens."""

    cpu: float  # of all threads
    wall: float


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The runs of one form, and how they compare with those of none beside them."""

    streams: int
    form: str
    runs: list[Run]
    cpu_ratio: float
    wall_ratio: float


def main(argv: list[str]) -> int:
    """Measures and prints the table.

    Raises:
        LLMJaxError: a setting is wrong.
    """
    parser = Parser(prog="python -m benchmarks.structured", description="What a demanded form costs.")
    add_settings(parser, settings_of(StructuredOptions).values(), section="structured")
    add_config_flags(parser)
    values = parser.parse(argv)
    options = options_of(StructuredOptions, values)
    check_writable(options.output_json)
    config = configs_of(values).engine
    llm = LLM.from_config(config.replace(max_num_seqs=max(options.streams)))
    try:
        figures = [figure for streams in options.streams for figure in measure(llm, streams, options)]
    finally:
        llm.close()
    report(figures, options)
    return 0


def measure(llm: LLM, streams: int, options: StructuredOptions) -> list[Figure]:
    """All forms in turns, none among them."""
    forms = ["none", *options.forms]
    runs: dict[str, list[Run]] = {form: [] for form in forms}
    for form in forms:
        _run(llm, streams, form, options.tokens, seed=0)  # compiles what it needs
    llm.warm_up()
    for seed in range(options.rounds):
        for form in forms if seed % 2 else reversed(forms):
            runs[form].append(_run(llm, streams, form, options.tokens, seed=seed))

    def ratio(form: str, kind: str) -> float:
        pairs = zip(runs[form], runs["none"], strict=True)
        return statistics.median(getattr(its, kind) / getattr(free, kind) for its, free in pairs)

    return [
        Figure(
            streams=streams, form=form, runs=runs[form], cpu_ratio=ratio(form, "cpu"), wall_ratio=ratio(form, "wall")
        )
        for form in forms
    ]


def _run(llm: LLM, streams: int, form: str, tokens: int, *, seed: int) -> Run:
    wanted = FORMS[form]
    free = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)
    held = free if wanted is None else replace(free, structured_outputs=StructuredOutputsParams(**wanted))
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    outputs = llm.generate([PROMPT] * streams, [held, *[free] * (streams - 1)], use_tqdm=False)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    if count != streams * tokens:
        raise LLMJaxError(f"{form}: {count} tokens instead of {streams * tokens}")
    return Run(cpu=cpu / count, wall=wall / count)


def report(figures: Sequence[Figure], options: StructuredOptions) -> None:
    """Prints the table and writes the file that is asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    machine, date = this_machine(), datetime.now(UTC).date().isoformat()
    table = Table(title=f"structured output; {machine}; {date}", title_justify="left", box=box.MARKDOWN)
    table.add_column("streams", justify="right")
    table.add_column("form of one of them")
    for column in ("CPU, ms a token", "beside none", "wall, ms a token", "beside none"):
        table.add_column(column, justify="right")
    for figure in figures:
        cpu, wall = (min(getattr(run, kind) for run in figure.runs) for kind in ("cpu", "wall"))
        ratios = [f"{100 * (ratio - 1):+.1f} %" for ratio in (figure.cpu_ratio, figure.wall_ratio)]
        table.add_row(f"{figure.streams}", figure.form, f"{1e3 * cpu:.3f}", ratios[0], f"{1e3 * wall:.3f}", ratios[1])
    Console(width=160).print(table)
    if options.output_json is not None:
        content = {"date": date, "machine": asdict(machine), "figures": [asdict(figure) for figure in figures]}
        write_json(Path(options.output_json), content)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"structured: error: {error}")
