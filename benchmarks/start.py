"""Where a start's time goes, and how soon a stream is as fast as it will be.

    python -m benchmarks.start MODEL [--cold] [--runs 3] [--setting max_num_seqs=8 ...]

Each run is a process of its own, from nothing to a stream that all programs serve. The first table has the way to the
first token: seconds on the clock and of computing, of all threads, each phase less those in it, and the least of all
runs. The second has what JAX did in the engine's process until all programs were there, and how fast the stream was
from its first token on, for SECONDS or until they were: in parts of what it makes when all programs are there, and of
what it makes then with nothing but the programs that it had.

With --cold programs are kept in a new folder for each run, else in one that a run before the first has filled.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.machine import this_machine

if TYPE_CHECKING:
    from llmjax import LLM
    from llmjax.engine.core.scheduler import StepPlan
    from llmjax.engine.device.batch import Bucket
    from llmjax.engine.programs.step_programs import Program, StepPrograms

# Functions that are timed where they are called, by module and name.
TIMED = {
    "read the file": ("llmjax.engine.loading.model", "open_checkpoint"),
    "declare the model": ("llmjax.engine.loading.model", "declare"),
    "weights": ("llmjax.engine.loading.model.Placer", "place"),
    "tokenizer": ("llmjax.engine.setup", "load_tokenizer"),
    "device state": ("llmjax.engine.programs.compiler.StepCompiler", "make_state"),
    "signature": ("llmjax.engine.build.ProgramCache", "of"),
}
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled or read by JAX",
}
PROMPT = "The first thing to know about the history of bread is"
WINDOW = 0.25  # seconds in which a stream's tokens are counted
SECONDS = 60.0  # that a stream runs beside the compiler
STEADY_SECONDS = 3.0
NEW_TOKENS = 256  # of a request, so that those of one window cost what those of another do


@dataclass
class Start:
    """One run; seconds.

    Attributes:
        wall, cpu: seconds of each phase, in order.
        events: what JAX did until all programs were there.
        ready: from the start of the process, until all programs were there.
        ready_cpu: CPU seconds of all threads until then.
        rates: tokens a second of the stream in each WINDOW from its first token on, until all programs are there
            or SECONDS have passed.
        steady: tokens a second when all programs are there.
        shares: the same speeds as fractions of what the programs that it used reach when nothing else is done.
    """

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    ready: float = 0.0
    ready_cpu: float = 0.0
    rates: list[float] = field(default_factory=list)
    steady: float = 0.0
    shares: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return sum(self.wall.values())

    def full_speed_after(self, share: float = 0.9) -> float:
        """Seconds from the first token until the stream has that part of its steady speed, and mostly keeps it: others
        on the machine may slow down any window."""
        fast = [rate >= share * self.steady for rate in self.rates]
        kept = (i for i in range(len(fast)) if fast[i] and 2 * sum(fast[i:]) > len(fast) - i)
        return next(kept, len(fast)) * WINDOW


class Phases:
    """Times what a start consists of; a phase within another one counts for itself."""

    def __init__(self, started: float) -> None:
        self.found = Start()
        self._open: list[list[float]] = []
        self._thread = threading.get_ident()
        self._add("Python", time.time() - started, time.process_time())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """On other threads nothing is timed."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._open.append([0.0, 0.0])
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            inside = self._open.pop()
            self._add(name, wall - inside[0], cpu - inside[1])
            if self._open:
                self._open[-1][0] += wall
                self._open[-1][1] += cpu

    def time(self, name: str, place: str, attribute: str) -> None:
        """Makes a function of a module or class a phase."""
        try:
            owner: Any = importlib.import_module(place)
        except ImportError:
            module, _, member = place.rpartition(".")
            owner = getattr(importlib.import_module(module), member)
        run: Callable[..., Any] = getattr(owner, attribute)

        @functools.wraps(run)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.phase(name):
                return run(*arguments, **options)

        setattr(owner, attribute, timed)

    def _add(self, name: str, wall: float, cpu: float) -> None:
        self.found.wall[name] = self.found.wall.get(name, 0.0) + wall
        self.found.cpu[name] = self.found.cpu.get(name, 0.0) + cpu


class Stream:
    """One request after another, token by token.

    Attributes:
        used: buckets of the programs that it had in each window of time.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.used: list[set[Bucket]] = []
        self._picked: set[Bucket] = set()
        programs = llm.engine.runner.programs
        pick = programs.pick

        def noted(plan: StepPlan, **options: Any) -> Program:
            program = pick(plan, **options)
            self._picked.add(program.bucket)
            return program

        programs.pick = noted  # type: ignore[method-assign]
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        self._prompt = tokenizer.encode(PROMPT)
        self._begin()

    def _begin(self) -> None:
        from llmjax import SamplingParams
        from llmjax.engine.core.request import EngineRequest

        length = min(NEW_TOKENS, self._llm.max_model_len - len(self._prompt))
        request = EngineRequest(
            request_id=self._llm.client.new_id(),
            prompt_token_ids=self._prompt,
            params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length),
            max_tokens=length,
            stop_token_ids=frozenset(),
        )
        self._llm.client.submit(request)

    def step(self) -> int:
        """Tokens that came."""
        outputs = self._llm.client.outputs()
        if any(output.finish_reason for output in outputs):
            self._begin()
        return sum(len(output.new_token_ids) for output in outputs)

    def rates(self, go_on: Callable[[], bool]) -> list[float]:
        """Tokens a second in each window of time, as long as it is to go on."""
        speeds, count, began = [], 0, time.perf_counter()
        while go_on() or not speeds:
            count += self.step()
            if (now := time.perf_counter()) - began >= WINDOW:
                speeds.append(count / (now - began))
                self.used.append(self._picked or self.used[-1])  # none was picked while it waited
                count, began, self._picked = 0, now, set()
        return speeds


def start(model: str, settings: dict[str, Any], started: float) -> Start:
    """Starts an engine in this process, which should have done nothing else.

    Args:
        started: when the process was asked for, as ``time.time()`` has it.
    """
    phases = Phases(started)
    for name, modules in (
        ("import jax", ["jax", "jax.numpy"]),
        ("import models", ["llmjax.models"]),
        ("other imports", ["llmjax.llm"]),
    ):
        with phases.phase(name):
            for module in modules:
                importlib.import_module(module)
    import jax

    from llmjax import LLM

    events: Counter[str] = Counter()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: events.update([EVENTS[event]] if event in EVENTS else [])
    )
    for name, (place, attribute) in TIMED.items():
        phases.time(name, place, attribute)
    with phases.phase("rest of LLM()"):
        llm = LLM(model, **settings)
    with phases.phase("first token"):
        stream = Stream(llm)
        while not stream.step():
            pass
    found = phases.found
    programs, end = llm.engine.runner.programs, time.perf_counter() + SECONDS
    found.rates = stream.rates(lambda: time.perf_counter() < end and len(programs.ready) < len(programs.buckets))
    used = list(stream.used)
    llm.warm_up()
    found.ready, found.ready_cpu = time.time() - started, time.process_time()
    found.events = dict(events)
    found.steady = _steady(stream)
    alone = {bucket: _steady_with(stream, programs, bucket) for bucket in set().union(*used)}
    found.shares = [
        rate / min(alone[bucket] for bucket in buckets) for rate, buckets in zip(found.rates, used, strict=True)
    ]
    llm.close()
    return found


def _steady(stream: Stream) -> float:
    """Tokens a second, the median of windows."""
    end = time.perf_counter() + STEADY_SECONDS
    rates = sorted(stream.rates(lambda: time.perf_counter() < end))
    return rates[len(rates) // 2]


def _steady_with(stream: Stream, programs: StepPrograms, bucket: Bucket) -> float:
    """The same with one program alone, and that which holds every plan."""
    everything = programs._programs
    programs._programs = {one: everything[one] for one in (bucket, programs.buckets[-1])}
    kept, programs._kept = programs._kept, set()
    try:
        return _steady(stream)
    finally:
        programs._programs, programs._kept = everything, kept


def _child(model: str, settings: dict[str, Any]) -> Start:
    arguments = json.dumps({"model": model, "settings": settings, "started": time.time()})
    command = [sys.executable, "-m", "benchmarks.start", "--child", arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def report(runs: Sequence[Start]) -> str:
    """Two Markdown tables."""
    lines = ["| to the first token | wall, s | CPU, s |", "|---|---:|---:|"]
    for name in runs[0].wall:
        wall, cpu = (min(getattr(run, kind).get(name, 0.0) for run in runs) for kind in ("wall", "cpu"))
        lines.append(f"| {name} | {wall:.2f} | {cpu:.2f} |")
    wall, cpu = (min(sum(getattr(run, kind).values()) for run in runs) for kind in ("wall", "cpu"))
    lines += [f"| **all** | **{wall:.2f}** | **{cpu:.2f}** |", ""]
    lines += [
        f"| run | {' | '.join(EVENTS.values())} | all programs after, s | CPU, s | steady, tok/s |"
        " 90 % of it after the first token, s | least and mean before all programs were there |"
        " of what the programs at hand make |",
        "|---|" + "---:|" * (len(EVENTS) + 6),
    ]
    for i, run in enumerate(runs):
        counts = " | ".join(str(run.events.get(name, 0)) for name in EVENTS.values())
        mean = sum(run.rates) / len(run.rates) / run.steady
        lines.append(
            f"| {i + 1} | {counts} | {run.ready:.1f} | {run.ready_cpu:.1f} | {run.steady:.0f} "
            f"| {run.full_speed_after():.2f} | {min(run.rates) / run.steady:.0%}, {mean:.0%} "
            f"| {min(run.shares):.0%}, {sum(run.shares) / len(run.shares):.0%} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--cold", action="store_true", help="nothing is compiled before")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--setting", nargs="*", default=[], metavar="NAME=VALUE", help="of EngineConfig, as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(asdict(start(**json.loads(arguments.child)))))
        return
    pairs = (pair.partition("=") for pair in arguments.setting)
    settings = {name: json.loads(value) for name, _, value in pairs}
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for i in range(arguments.runs + (not arguments.cold)):
            cache = f"{folder}/{i if arguments.cold else 0}"
            runs.append(_child(arguments.model, {"compilation_cache_dir": cache, **settings}))
    print(f"{this_machine()}\n\n{report(runs if arguments.cold else runs[1:])}")


if __name__ == "__main__":
    main()
