"""How long it takes to make embeddings, beside other engines, on this machine.

    python -m benchmarks.embeddings MODEL [--peer onnx=PYTHON] [--peer sentence-transformers=PYTHON]
                                    [--peer llama.cpp=PYTHON --gguf FILE] [--counts 1 32 512] [--rounds 5]
                                    [--options '{"quantization": "q8_0"}']

MODEL is a folder in Hugging Face's layout, FILE the same model for llama.cpp; ``--options`` are llmjax's settings. A
peer is named by the interpreter of an environment that has it:
`pip install sentence-transformers`, and `optimum-onnx[onnxruntime]` for `onnx`, which is the same library on ONNX
Runtime; `llama-cpp-python`.
All engines get the same texts, of 4 to 60 words, other ones in each round, and take turns; the fastest round counts.
`cpu` is the time of all processors together, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.machine import this_machine

WORKER = Path(__file__).parent / "engines" / "embeddings.py"
OURS = "llmjax"
PEERS = ("sentence-transformers", "onnx", "llama.cpp")
TEXT = """the of and to in is was for on that with as at by from this which or have an they it not but all were when we
there can water river history number people language music system theory winter market question between during against
children machine government mountain electricity philosophical approximately seventeen notwithstanding"""
WORDS = TEXT.split()
LEAST_WORDS, MOST_WORDS = 4, 60


@dataclass(frozen=True)
class Taken:
    """Seconds that a list of texts takes: of the clock, and of all processors."""

    wall: float
    cpu: float
    vectors: np.ndarray  # [some of the texts, size]


class Engine:
    """A process that makes embeddings."""

    def __init__(self, name: str, python: str, model: str, *options: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(WORKER), name, model, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def encode(self, texts: Sequence[str]) -> Taken:
        """Raises SystemExit if the engine cannot."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(list(texts)) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise SystemExit(f"{self.name} has ended: does its environment have all that it needs?") from None
        return Taken(answer["wall"], answer["cpu"], np.array(answer["vectors"]))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def texts_of(count: int, *, seed: int) -> list[str]:
    """A number of texts of random words."""
    rng = np.random.default_rng([count, seed])
    lengths = rng.integers(LEAST_WORDS, MOST_WORDS + 1, count)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def measure(engines: Sequence[Engine], count: int, rounds: int) -> tuple[dict[str, Taken], float]:
    """The fastest round of each engine, wall and cpu apart, and the least cosine of two engines' vectors."""
    times: dict[str, list[Taken]] = {engine.name: [] for engine in engines}
    cosine = 1.0
    for number in range(rounds + 1):  # the first one warms up
        texts = texts_of(count, seed=number)
        shift = number % len(engines)
        taken = {engine.name: engine.encode(texts) for engine in [*engines[shift:], *engines[:shift]]}
        for name, one in taken.items():
            cosine = min(cosine, float((one.vectors * taken[OURS].vectors).sum(1).min()))
            if number:
                times[name].append(one)
    best = {
        name: Taken(min(one.wall for one in all_), min(one.cpu for one in all_), all_[0].vectors)
        for name, all_ in times.items()
    }
    return best, cosine


def rows(count: int, best: dict[str, Taken], cosine: float) -> list[str]:
    """Rows of the table: one for each engine, with its time as a multiple of ours."""
    ours = best[OURS]
    return [
        f"| {count} | {name} | {one.wall * 1e3:.1f} | {one.wall / ours.wall:.2f}x | {one.cpu * 1e3:.1f} "
        f"| {one.cpu / max(ours.cpu, 1e-9):.2f}x | {cosine:.5f} |"
        for name, one in best.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"one of {', '.join(PEERS)}")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 32, 512], help="texts at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf", metavar="FILE", help="of the same model, for llama.cpp")
    parser.add_argument("--options", default="{}", metavar="JSON", help="llmjax's settings")
    options = parser.parse_args(arguments)
    interpreters = {OURS: sys.executable}
    for peer in options.peer:
        name, _, python = peer.partition("=")
        if name not in PEERS or not python:
            parser.error(f"--peer {peer}: must be NAME=PYTHON, with one of {', '.join(PEERS)}")
        interpreters[name] = python
    if min(options.counts) < 1 or options.rounds < 1:
        parser.error("--counts and --rounds must be at least 1")
    if "llama.cpp" in interpreters and options.gguf is None:
        parser.error("llama.cpp needs --gguf")
    models = dict.fromkeys(interpreters, (options.model,))
    models |= {OURS: (options.model, options.options), "llama.cpp": (options.gguf,)}
    engines = [Engine(name, python, *models[name]) for name, python in interpreters.items()]
    try:
        print(f"{this_machine()}\n")
        print("| texts | engine | wall ms | of ours | cpu ms | of ours | least cosine |\n|---|---|---|---|---|---|---|")
        for count in options.counts:
            print("\n".join(rows(count, *measure(engines, count, options.rounds))), flush=True)
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
