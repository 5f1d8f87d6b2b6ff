"""What rows cost that see the same pages: streams with one long prompt, beside streams with prompts of their own.

    python -m benchmarks.shared_prompt [--config smollm2] [--streams 16] [--common 4096] [--own 128] [--rounds 5]

Two tables. Attention alone: one layer of 9 heads, 3 for keys and values, h 64, for each type of page and each
instruction set that the machine has. Then whole decode steps of the model: the time between the first and the last
token of streams whose pages are all there, over the steps between them. Both arrangements take turns, so that what else
the machine does meets them alike; there are medians and the best, of the clock and of all threads' computing time, and
the ratio is that of the medians. Engine flags are passed on.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.kernels import LAYERS, AttentionShape, attention_input
from benchmarks.machine import this_machine
from benchmarks.scaling import refuse_evicted, step_seconds
from llmjax.bench.options import options_of
from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.config import setting
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.kernels.cpu import attention as cpu_attention
from llmjax.kernels.cpu.library import Library, forced_isa, library
from llmjax.llm import LLM
from llmjax.outputs import RequestOutput
from llmjax.sampling.params import SamplingParams
from llmjax.settings import settings_of

PARTS = ("attention", "step")
PAGES = ("bfloat16", "float32", "int8")


@dataclass(frozen=True, kw_only=True)
class SharedPromptOptions:
    """What is measured."""

    parts: Sequence[str] = setting(PARTS, "attention alone, whole steps", section="shared prompts")
    streams: int = setting(16, "decoded at once")
    common: int = setting(4096, "tokens that all prompts begin with in one arrangement, and none in the other")
    own: int = setting(128, "tokens of each prompt after them")
    new_tokens: int = setting(32, "decode steps of a measurement")
    rounds: int = setting(5, "measurements of each arrangement, in turns")
    output_json: str | None = setting(None, "file for all figures as JSON")

    def __post_init__(self) -> None:
        for name in ("streams", "common", "own", "new_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if unknown := set(self.parts) - set(PARTS):
            raise ConfigError(f"--parts: {min(unknown)!r} is none of {', '.join(PARTS)}")

    @property
    def length(self) -> int:
        """Tokens of a prompt."""
        return self.common + self.own


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a layer or a step in one arrangement, by round."""

    wall: list[float]
    cpu: list[float]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Both arrangements of one case."""

    case: str
    own: Times  # prompts of their own
    common: Times

    def ratio(self, kind: str) -> float:
        """How much less the common prompt takes."""
        own, common = (statistics.median(getattr(times, kind)) for times in (self.own, self.common))
        return own / common


def main(argv: list[str]) -> int:
    """Measures and prints the tables.

    Raises:
        LLMJaxError: a setting is wrong, or the model cannot be loaded.
    """
    parser = Parser(prog="python -m benchmarks.shared_prompt", description="Decoding after one long prompt.")
    add_settings(parser, settings_of(SharedPromptOptions).values(), section="shared prompts")
    add_config_flags(parser)
    values = parser.parse(argv)
    options = options_of(SharedPromptOptions, values)
    check_writable(options.output_json)
    figures: dict[str, list[Figure]] = {}
    native = library()
    if "attention" in options.parts and native is not None:
        figures["attention, a layer"] = attention(native, options)
    if "step" in options.parts:
        llm = LLM.from_config(
            configs_of(values).engine.replace(
                max_num_seqs=options.streams,
                max_model_len=options.length + options.new_tokens + 1,
                enable_prefix_caching=True,
            )
        )
        try:
            figures["a whole step"] = [steps(llm, options)]
        finally:
            llm.close()
    report(figures, options)
    return 0


def attention(native: Library, options: SharedPromptOptions) -> list[Figure]:
    """Every type of page and instruction set."""
    return [_attention(cache, isa, options) for cache in PAGES for isa in native.usable]


def _attention(cache: str, isa: str, options: SharedPromptOptions) -> Figure:
    alone = AttentionShape("", options.streams, options.length, 1, 9, 3, 64, cache)
    runs = [_layers(shape) for shape in (alone, replace(alone, common=options.common))]
    times = [Times(wall=[], cpu=[]) for _ in runs]
    with forced_isa(isa):
        for run in runs:
            run()
        for _ in range(options.rounds):
            for run, its in zip(runs, times, strict=True):
                cpu, wall = time.process_time(), time.perf_counter()
                run()
                its.wall.append((time.perf_counter() - wall) / LAYERS)
                its.cpu.append((time.process_time() - cpu) / LAYERS)
    return Figure(case=f"{cache}, {isa}", own=times[0], common=times[1])


def _layers(shape: AttentionShape) -> Callable[[], object]:
    """Runs the attention of some layers, one after another."""
    q, k, pages, batch = attention_input(shape)

    def all_layers(q: jax.Array, pages: list[Any]) -> Any:
        outputs = []
        for layer in pages:
            q, layer = cpu_attention.attend(q, k, k, layer, batch, scale=shape.head_dim**-0.5)
            outputs.append(layer)
        return q, outputs

    run, held = jax.jit(all_layers, donate_argnums=1), [pages]

    def once() -> None:
        out, held[0] = run(q, held[0])
        jax.block_until_ready(out)

    return once


def steps(llm: LLM, options: SharedPromptOptions) -> Figure:
    """Whole steps; the prompts' pages are computed before the clock runs."""
    llm.warm_up()
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.integers, 3, min(10_000, llm.info.vocab_size))
    beginning = draw(size=options.common).tolist()
    prompts = {
        kind: [
            [*(beginning if kind == "common" else draw(size=options.common).tolist()), *draw(size=options.own).tolist()]
            for _ in range(options.streams)
        ]
        for kind in ("own", "common")
    }
    times = {kind: Times(wall=[], cpu=[]) for kind in prompts}
    for _ in range(options.rounds):
        for kind, texts in prompts.items():
            _generate(llm, texts, 1)  # the other arrangement may have taken the pages
            cpu = time.process_time()
            _generate(llm, texts, 1)
            first = time.process_time() - cpu
            outputs = _generate(llm, texts, 1 + options.new_tokens)
            times[kind].wall.append(step_seconds(outputs))
            times[kind].cpu.append((time.process_time() - cpu - 2 * first) / options.new_tokens)
            refuse_evicted(outputs, options.common, page_size=llm.engine.config.page_size)
    return Figure(case=llm.model_name, own=times["own"], common=times["common"])


def _generate(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def report(found: dict[str, list[Figure]], options: SharedPromptOptions) -> None:
    """Prints the tables and writes the file that is asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    machine, date = this_machine(), datetime.now(UTC).date().isoformat()
    console = Console(width=160)
    console.print(
        f"{options.streams} streams at {options.length} tokens, {options.common} of them common; {machine}; {date}",
        highlight=False,
    )
    for title, figures in found.items():
        table = Table(title=title, title_justify="left", box=box.MARKDOWN)
        table.add_column("")
        for kind in ("wall", "CPU"):
            for column in (f"own, {kind} ms", f"one prompt, {kind} ms", "ratio"):
                table.add_column(column, justify="right")
        for figure in figures:
            cells = []
            for kind in ("wall", "cpu"):
                cells += [_median_and_best(getattr(times, kind)) for times in (figure.own, figure.common)]
                cells.append(f"{figure.ratio(kind):.2f}×")
            table.add_row(figure.case, *cells)
        console.print()
        console.print(table)
    if options.output_json is not None:
        content = {title: [asdict(figure) for figure in figures] for title, figures in found.items()}
        write_json(Path(options.output_json), {"date": date, "machine": asdict(machine), "figures": content})


def _median_and_best(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ({min(seconds) * 1e3:.2f})"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"shared_prompt: error: {error}")
