"""How long it takes to read vocabularies, and to turn text into tokens and back.

    python -m benchmarks.tokenizer MODEL [MODEL ...] [--characters 20000]

A MODEL is a folder with a tokenizer or a GGUF file. `load` is from its files to a tokenizer. `text` is English with
some Chinese and emoji, and the slowest run is that of one repeated character; both are encoded with `--characters`
characters, the run with twice as many too: more than twice the time says that a pattern tries many ways to cut it.
`decode` is what a stream pays for a token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import this_machine
from llmjax.errors import LLMJaxError
from llmjax.tokenizer import Tokenizer, load_tokenizer

TEXT = "The quick brown fox 你好 😀 "
RUNS = (" ", "\t", "'", "a", "1", "中", "\n")
ROUNDS = 3  # of which the fastest counts


def timed(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of `ROUNDS`."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def stream(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """Turns ids into text one by one."""
    detokenizer = tokenizer.detokenizer()
    for token_id in ids:
        detokenizer.add((token_id,))


def row(name: str, characters: int) -> str:
    """One row of the table."""
    began = time.perf_counter()
    tokenizer = load_tokenizer(Path(name))
    load = time.perf_counter() - began
    text = (TEXT * (characters // len(TEXT) + 1))[:characters]
    ids = tokenizer.encode(text)
    encode, decode = timed(lambda: tokenizer.encode(text)), timed(lambda: stream(tokenizer, ids))
    took = {run: timed(lambda run=run: tokenizer.encode(run * characters)) for run in RUNS}  # type: ignore[misc]
    worst = max(took, key=lambda run: took[run])
    twice = timed(lambda: tokenizer.encode(worst * 2 * characters))
    return (
        f"| {name} | {load:.2f} | {encode * 1e3:.1f} | {worst!r} | {took[worst] * 1e3:.1f} | {twice * 1e3:.1f} "
        f"| {decode / len(ids) * 1e6:.2f} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--characters", type=int, default=20_000)
    arguments = parser.parse_args(argv)
    print(f"{this_machine()}\n")
    print("| model | load, s | text, ms | slowest run of | ms | twice as long, ms | decode, µs a token |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.models:
        try:
            print(row(name, arguments.characters), flush=True)
        except LLMJaxError as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
