"""llmjax and other engines on the same GGUF file and the same prompts, in turns.

    python -m benchmarks.peers --model FILE.gguf --peer llama.cpp=PYTHON --peer vllm=PYTHON --peer openvino=PYTHON

Every engine runs in a process of its own, with the interpreter that has it installed, and is stopped while it is not
its turn. A point's figure is the fastest of its runs. Flags of ``llmjax serve`` that set the engine (--dtype,
--max-num-batched-tokens, …) are llmjax's; peers run with the settings that their adapters in benchmarks/engines/ say.
Nobody drafts: llmjax's own drafts for few streams are off, so that a step is of one token a stream.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.comparison import OURS, Contender, Rounds, compare
from benchmarks.engines.interface import ADAPTERS, EngineOptions
from benchmarks.machine import this_machine
from benchmarks.peer_report import Setup, publish, records_of
from benchmarks.points import DEFAULT, Point, parse_points
from benchmarks.records import record
from llmjax.bench.options import options_of
from llmjax.bench.own_server import changed_settings
from llmjax.bench.pyplot import check_plot
from llmjax.bench.report import check_writable
from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.resolve import resolve_model
from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.config import setting
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.kernels.cpu.library import ISA_VARIABLE
from llmjax.settings import nearest, settings_of
from llmjax.system import processor_name
from llmjax.tokenizer import load_tokenizer

TEXT = "The paged cache keeps the keys and values of every token in fixed blocks. When a new request arrives, the"


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """The comparison."""

    peer: Sequence[str] = setting(
        (), f"an engine ({', '.join(ADAPTERS)}) and its interpreter, as NAME=PYTHON", separator=None, section="peers"
    )
    points: str = setting(DEFAULT, "what is measured: decodeN[xLENGTH], prefillLENGTH, ttftNxLENGTH, load")
    rounds: int = setting(3, "turns of every engine")
    runs: int = setting(2, "measurements of a point in one turn")
    new_tokens: int = setting(64, "tokens that a decode point makes in each stream")
    peer_threads: int | None = setting(None, "compute threads of the peers (default: one per core)")
    work_dir: str = setting(
        str(Path(tempfile.gettempdir()) / "llmjax-peers"), "folder for logs and for weights that a peer has to convert"
    )
    output_json: str | None = setting(None, "file for all figures as JSON")
    plot: str | None = setting(None, "picture file of the figures; needs matplotlib")
    record: str | None = setting(
        None,
        "a name of the weights, such as 'SmolLM2-135M Q4_1': figures become those of this processor in "
        "benchmarks/results/cpu, from which pages are generated",
    )

    def __post_init__(self) -> None:
        for name in ("rounds", "runs", "new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")

    def interpreters(self) -> dict[str, str]:
        """Interpreter by engine, llmjax first.

        Raises:
            ConfigError: a peer is unknown, named twice or has no interpreter.
        """
        paths = {OURS: sys.executable}
        for item in self.peer:
            name, equals, python = item.partition("=")
            if not equals or not python:
                raise ConfigError(f"--peer must be NAME=PYTHON, not {item!r}")
            if name not in ADAPTERS:
                raise ConfigError(f"--peer: unknown engine {name!r}{nearest(name, ADAPTERS)} ({', '.join(ADAPTERS)})")
            if name in paths:
                raise ConfigError(f"--peer: {name} is named twice" if name != OURS else "--peer: llmjax always runs")
            paths[name] = python
        return paths


def main(argv: list[str]) -> int:
    """Runs the comparison and prints its table.

    Raises:
        LLMJaxError: a setting is wrong, or llmjax fails.
    """
    parser = Parser(prog="python -m benchmarks.peers", description="Compare llmjax with other engines on one file.")
    add_settings(parser, settings_of(PeerOptions).values(), section="peers")
    add_config_flags(parser)
    values = parser.parse(argv)
    options = options_of(PeerOptions, values)
    interpreters, points = options.interpreters(), parse_points(options.points)
    check_writable(options.output_json)
    check_plot(options.plot)
    config = configs_of(values).engine
    path = resolve_model(config)
    checkpoint = open_checkpoint(path)
    if checkpoint.gguf is None:
        raise ConfigError(f"--model: {path} is not a .gguf file, the one format that the peers have in common")
    work_dir = Path(options.work_dir).absolute()
    work_dir.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in changed_settings(config).items() if name != "model"}
    without_drafts = {"auto_speculation": False}  # peers make one token a step as well
    threads = options.peer_threads or usable_cores()
    contenders = [
        Contender(
            name,
            python,
            EngineOptions(
                model=str(path.absolute()),
                work_dir=str(work_dir),
                threads=threads,
                max_streams=max(point.streams for point in points),
                max_tokens=_longest(points, options.new_tokens),
                settings=without_drafts | settings if name == OURS else {},
            ),
        )
        for name, python in interpreters.items()
    ]
    rounds = Rounds(
        rounds=options.rounds,
        runs=options.runs,
        new_tokens=options.new_tokens,
        vocab_size=int(checkpoint.config["vocab_size"]),
        text=load_tokenizer(path, gguf=checkpoint.gguf).encode(TEXT),
    )
    log = Console(stderr=True)
    standings = compare(contenders, points, rounds, log=lambda line: log.print(line, style="dim", highlight=False))
    setup = Setup(
        model=path.name,
        weight_bytes=bytes_read(checkpoint),
        threads=threads,
        rounds=options.rounds,
        runs=options.runs,
        new_tokens=options.new_tokens,
    )
    publish(standings, points, setup, output_json=options.output_json, plot=options.plot)
    if options.record is not None:
        written = record(
            records_of(standings, points, setup, model=options.record, settings=_as_flags(settings)),
            this_machine(),
            processor_name(),
        )
        log.print(f"{written}; python -m tests.pages writes the tables", highlight=False)
    return 0


def _as_flags(settings: Mapping[str, object]) -> str:
    """Settings that differ from the defaults, and the instruction set if one is forced, as people would give them."""
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in sorted(settings.items())]
    forced = os.environ.get(ISA_VARIABLE)
    return " ".join([*([f"{ISA_VARIABLE}={forced}"] if forced else []), *flags])


def bytes_read(checkpoint: Checkpoint) -> int:
    """Bytes of the file that a decode step has to read: all of it, but of an untied embedding next to nothing."""
    assert checkpoint.gguf is not None
    tensors = checkpoint.gguf.tensors
    skipped = "token_embd.weight" if "output.weight" in tensors else None
    return sum(tensor.nbytes for name, tensor in tensors.items() if name != skipped)


def _longest(points: Sequence[Point], new_tokens: int) -> int:
    """Tokens of the longest prompt and answer, of the points and of the text that answers are compared on."""
    return max(256, *(point.prompt + (1 + new_tokens if point.kind == "decode" else 4) for point in points))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"peers: error: {error}")
