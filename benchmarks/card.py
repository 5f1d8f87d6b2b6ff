"""The most of some minutes on a card: what is worth knowing, ranked, each part with a budget, written as it comes.

    python -m benchmarks.card --minutes 28 [--vllm PYTHON] [--results FOLDER]
    python -m benchmarks.card --list
    python -m benchmarks.card --device cpu --smoke --minutes 30

Each part runs in a process of its own, which is ended when its budget is over; what it has found by then is kept.
Started again for the same commit and card, it goes on with the parts that did not end. Weights are random and made on
the device, settings are those that users get. The end is a table, and what has changed in the tables of divisions
(`git diff`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu_figures import Figure, Limits, Work, head, row_of
from benchmarks.machine import commit

ROOT = Path(__file__).parent.parent
FINDINGS, STATE = "findings.jsonl", "parts.json"
ENDED, CUT, FAILED = "ended", "cut", "failed"
LEAST_SECONDS = 20.0  # with less, a part would not get past its imports
TUNED = "kernels/cuda/tuned"


@dataclass(frozen=True)
class Part:
    """One thing worth knowing.

    Attributes:
        name: what it is called, and the function of `benchmarks.card_parts` that measures it.
        minutes: most time that it may take on a card.
        question: what it answers.
        then: what to do by the answer.
    """

    name: str
    minutes: float
    question: str
    then: str = ""


PARTS = (
    Part("doctor", 1.5, "do the driver, the plug-in and what steps ask of a device work?"),
    Part("limits", 1, "copies, reads, products in bf16 and FP8, launches: what nothing on this card exceeds"),
    Part("tests", 5, "which tests of -m cuda pass, fail, or do not end, in four processes?"),
    Part(
        "decode-bf16",
        4,
        "8B in bf16: decode of 1 to 256, prompts of 512 to 8k; goals: 85 % of copies, 60 % of products",
    ),
    Part(
        "kernels-bf16",
        1.5,
        "which 15 kernels cost most in decodes of 1 and 64 and in a prompt of 2k, in bf16?",
        "if norms, rope and storing keys take more than 5 % of a decode, one kernel of the three is worth "
        "making; if merging parts of rows that have one takes more than 2 %, a condition around it",
    ),
    Part("vllm", 4, "the same decodes and prompts by vLLM, if --vllm names an interpreter that has it"),
    Part("decode-q4_k", 2.5, "the same in Q4_K; goal 75 % of copies at batch 1"),
    Part(
        "kernels-q4_k",
        1.5,
        "which 15 kernels cost most in Q4_K?",
        "if products stay below 75 % of copies, a ring of 4 or more stages in shared memory with scales beside codes; "
        "if putting x in order for them and adding it up take more than 5 %, one kernel with the norm before it",
    ),
    Part(
        "chunks",
        3,
        "is a prompt of 8k fastest in chunks of 2,048, 4,096 or 8,192?",
        "the largest step by memory (llmjax/step_sizes.py), and whether an A100 wants another one, as vLLM has it",
    ),
    Part(
        "prompt-graphs",
        2,
        "what do CUDA graphs cost or bring in prompts: is auto, which keeps prompts out, right?",
        "GRAPH_TOKENS (llmjax/engine/programs/compiler.py)",
    ),
    Part("decode-int4", 2, "the same in 4 bits with groups of 128, as GPTQ and AWQ have them"),
    Part(
        "decode-fp8",
        2,
        "the same in FP8, activations too where products are cuBLASLt's",
        "MAX_FLOAT8_ROWS, and whether cuBLASLt or XLA's own kernel was chosen (kernels of a profile)",
    ),
    Part(
        "attention",
        2,
        "Triton, Mosaic GPU and cuDNN side by side: decodes, prompts",
        "mosaic in the table of divisions; cuDNN, where it is ahead by more than copying pages costs",
    ),
    Part(
        "dequantizing",
        1.5,
        "from how many rows on is a quantized matrix better dequantized whole?",
        "MAX_FRAGMENT_ROWS; dequantized_copies by default, where memory allows, if steps of 512 gain 20 % by copies",
    ),
    Part(
        "experts",
        2,
        "four layers of Qwen3-30B-A3B: is the time of experts that of the bytes in use?",
        "grouped products of warpgroups, if 64 rows and more take 1.5 times what the bytes in use do",
    ),
    Part(
        "latent",
        2,
        "layers of DeepSeek-V2-Lite: is latent attention bound by the bytes of its pages?",
        "products of warpgroups for latent attention, if a key costs 1.5 times its bytes",
    ),
    Part("tuning", 6, "better divisions for exactly these shapes, costliest first"),
)


@dataclass
class State:
    """How each part ended, in a file: what a later call goes on from."""

    path: Path
    about: str  # commit and device
    parts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, about: str) -> State:
        """The state that is in a folder, unless it is of another commit or device."""
        path = folder / STATE
        if path.exists() and (kept := json.loads(path.read_text()))["about"] == about:
            return cls(path, about, kept["parts"])
        return cls(path, about)

    def note(self, part: str, how: str) -> None:
        self.parts[part] = how
        self.path.write_text(json.dumps({"about": self.about, "parts": self.parts}, indent=1))

    def ranked(self, parts: Sequence[Part]) -> list[Part]:
        """The parts that have not ended: first what was never begun, then what was cut off or failed."""
        left = [part for part in parts if self.parts.get(part.name) != ENDED]
        return sorted(left, key=lambda part: part.name in self.parts)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.card", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, help="that all of it may take")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: whether it runs, and nothing about speed")
    parser.add_argument("--only", default="", help="parts, with commas between them; default: all")
    parser.add_argument("--again", action="store_true", help="forget what ended before")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--results", default=str(ROOT / "build" / "card"), help="a folder; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="show the parts and their budgets")
    options = parser.parse_args(argv)
    console = Console(width=160)
    if options.list:
        for part in PARTS:
            console.print(f"{part.minutes:>5g} min  {part.name:<14} {part.question}", highlight=False)
            if part.then:
                console.print(f"{'':26}by the answer: {part.then}", highlight=False)
        return 0
    if options.minutes is None or options.minutes <= 0:
        parser.error("--minutes says how long it may take")
    if options.device == "cpu" and not options.smoke:
        parser.error("--device cpu measures nothing: add --smoke")
    known = {part.name: part for part in PARTS}
    wanted = options.only.split(",") if options.only else list(known)
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    state = State.of(folder, f"{commit()} {options.device}{' smoke' if options.smoke else ''}")
    if options.again or not state.parts:
        (folder / FINDINGS).unlink(missing_ok=True)
        state.parts = {}
    until = time.monotonic() + 60 * options.minutes
    for part in state.ranked([part for part in PARTS if part.name in wanted]):
        left = until - time.monotonic()
        if left < LEAST_SECONDS:
            break
        seconds = min(left, 60 * part.minutes * (10 if options.smoke else 1))
        console.rule(f"{part.name}: {part.question} ({seconds:.0f} s)", align="left")
        how = run(part, folder, seconds, options)
        console.print(f"{part.name}: {how}", highlight=False)
        state.note(part.name, how)
    for line in report(folder, state):
        print(line)
    sys.stdout.flush()
    subprocess.run(["git", "diff", "--stat", "-p", "--", TUNED], cwd=ROOT, check=False)
    return 0 if all(state.parts.get(name) == ENDED for name in wanted) else 1


def run(part: Part, folder: Path, seconds: float, options: argparse.Namespace) -> str:
    """Runs a part in a process group of its own, for some seconds at most; says how it ended."""
    command = [sys.executable, "-m", "benchmarks.card_parts", part.name, "--folder", str(folder)]
    command += ["--seconds", f"{seconds:.0f}", "--device", options.device]
    command += ["--smoke"] if options.smoke else []
    command += ["--vllm", options.vllm] if options.vllm else []
    settings = {"JAX_PLATFORMS": "cuda,cpu" if options.device == "cuda" else "cpu"}
    settings |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if options.smoke else {}  # programs are compiled sooner
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **settings}, start_new_session=True)
    try:
        return ENDED if process.wait(seconds) == 0 else FAILED
    except subprocess.TimeoutExpired:
        return CUT
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it has started."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def findings(folder: Path) -> Iterator[dict[str, Any]]:
    """All that was found, in order; of what was found twice the last."""
    path = folder / FINDINGS
    lines = path.read_text().splitlines() if path.exists() else []
    found: dict[tuple[str, str, str | None], dict[str, Any]] = {}
    for line in lines:
        if line.endswith("}"):  # the last one may be cut off
            entry = json.loads(line)
            found.pop(key := (entry["part"], entry["name"], entry.get("by")), None)
            found[key] = entry
    yield from found.values()


def report(folder: Path, state: State) -> Iterator[str]:
    """The table of everything, in Markdown."""
    everything = list(findings(folder))
    said = {entry["name"]: entry["seconds"] for entry in everything if entry["part"] == "limits" and "work" in entry}
    work = {entry["name"]: entry["work"] for entry in everything if "work" in entry}
    copies, products = "copies", "products, bf16"
    limits = Limits(float("inf"), float("inf"))  # not measured: every share is 0 %
    if copies in said and products in said:
        limits = Limits(
            bytes_per_second=work[copies]["bytes"] / said[copies],
            flops_per_second=work[products]["flops"] / said[products],
        )
    for part in PARTS:
        own = [entry for entry in everything if entry["part"] == part.name]
        then = f" By the answer: {part.then}." if part.then else ""
        yield f"\n### {part.name}: {state.parts.get(part.name, 'not begun')}\n\n{part.question}{then}\n"
        figures = [entry for entry in own if "work" in entry]
        if figures:
            yield head()
        for entry in figures:
            figure = Figure(entry["name"], entry["by"], entry["seconds"], Work(**entry["work"]), entry["tokens"])
            yield row_of(figure, limits)
        if figures:
            yield ""
        yield from (f"* {entry['name']}: {entry['said']}" for entry in own if "said" in entry)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
