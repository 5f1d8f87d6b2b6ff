"""What quantization costs: perplexity of a text with the weights, activations and KV cache kept in different ways.

    python -m benchmarks.quality MODEL ... --text FILE [--max-tokens 16384] [--rows none,dtype=float32 stored q4_k ...]

A row is a scheme, as `--quantization` has them, and settings of the engine that differ from the defaults, separated by
commas; `isa=avx2` among them makes the C++ kernels those of a CPU that has no more than that. The first row is what the
others are compared with: token by token, because the error of a difference is much smaller than of the two figures.
`MB` is what the weights take in memory, embeddings included. With --at-most the command fails if a row differs by more.

Each row runs in a process of its own, and what it found goes into --results at once: a run that is interrupted, or
asked for more rows, goes on from there. Standard output is Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.machine import this_machine
from llmjax import LLM
from llmjax.config import EngineConfig
from llmjax.engine.clients.client import Control
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.evaluation.perplexity import Perplexity, Windowing, score_windows, text_tokens
from llmjax.kernels.cpu.library import ISA_VARIABLE, library
from llmjax.settings import make_config, nearest, parse_text, settings_of
from llmjax.version import __version__

REFERENCE = "none,dtype=float32"
ISA = "isa"  # what a row calls the instruction set of its kernels
SCHEMES = "stored q8_0 q6_k q5_k q4_k_m q4_k q4_0 q3_k q2_k int8 int4_g64 int4 fp8"
INT8 = "activations=int8,batch_invariant=true"  # with AMX, prompts as well
KV_TYPES = ("int8", "fp8_e4m3", "fp8_e5m2")
ROWS = (
    *(REFERENCE, "none", *SCHEMES.split()),
    *(f"{scheme},{INT8}" for scheme in ("stored", "q8_0", "q4_k", "q4_0", "int8", "w8a8")),
    *(f"stored,kv_cache_dtype={kind}" for kind in KV_TYPES),
)


@dataclass(frozen=True)
class Score:
    """What one row found.

    Attributes:
        logprobs: log-probabilities of the scored tokens, in the order of the text.
        weight_bytes: what the model's weights take in memory.
        seconds: how long scoring took, once the first program was compiled.
    """

    logprobs: tuple[float, ...]
    weight_bytes: int
    dtype: str
    seconds: float


@dataclass(frozen=True)
class Difference:
    """Between two rows' perplexities, as shares of the reference's.

    Attributes:
        value: exp(mean difference of negative log-probabilities) - 1.
        error: its standard error, tokens taken as independent.
    """

    value: float
    error: float

    @classmethod
    def of(cls, logprobs: Sequence[float], reference: Sequence[float]) -> Difference:
        """Compares two rows that scored the same tokens."""
        change = np.subtract(reference, logprobs)
        ratio = math.exp(change.mean())
        return cls(ratio - 1, ratio * change.std(ddof=1) / math.sqrt(change.size))


def engine_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings of the engine from texts such as ``dtype=float32``.

    Raises:
        ConfigError: one has no value, an unknown name or a value of another type.
    """
    known, values = settings_of(EngineConfig), {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"{pair!r} is not a SETTING=VALUE of the engine{nearest(name, known)}")
        values[name] = parse_text(known[name], value, source=name)
    return values


def row_settings(row: str) -> dict[str, Any]:
    """What a row stands for: a scheme, then settings, separated by commas; ISA is the name of an instruction set.

    Raises:
        ConfigError: see `engine_settings`, or this machine has no such instruction set.
    """
    scheme, *pairs = row.split(",")
    forced = [pair.partition("=")[2] for pair in pairs if pair.startswith(f"{ISA}=")]
    settings = engine_settings([pair for pair in pairs if not pair.startswith(f"{ISA}=")])
    for isa in forced:
        native = library()
        usable = () if native is None else native.usable
        if isa not in usable:
            raise ConfigError(f"{ISA}={isa}: not available; there is: {', '.join(usable)}")
        settings[ISA] = isa
    return {"activations": "float", "quantization": scheme, **settings}


def score(model: str, settings: Mapping[str, Any], text: str, windowing: Windowing) -> Score:
    """Scores a text; one window at a time, so that they come in order.

    Args:
        settings: as `row_settings` has them. An instruction set is chosen for the whole process.

    Raises:
        LLMJaxError: a setting is wrong, the model cannot be read, or the text is too short.
    """
    settings = dict(settings)
    if isa := settings.pop(ISA, None):  # before the library is first asked for, in a process that scores this row alone
        os.environ[ISA_VARIABLE] = isa
    shape = {"max_num_seqs": 1, "max_num_batched_tokens": windowing.context, "max_model_len": windowing.context}
    config = {"model": model, **shape, "max_logprobs": 0, "compile_threads": 1, **settings}
    llm = LLM.from_config(make_config(EngineConfig, config, source="--rows"))
    try:
        assert llm.tokenizer is not None
        token_ids, bos = text_tokens(llm.tokenizer, text)
        windows = windowing.cut(token_ids, bos=bos)
        llm.client.control(Control.WAIT_READY).result()
        started = time.perf_counter()
        logprobs = np.concatenate(list(score_windows(llm.client, windows)))
        return Score(
            logprobs=tuple(logprobs.tolist()),
            weight_bytes=llm.info.weight_bytes,
            dtype=llm.info.dtype,
            seconds=time.perf_counter() - started,
        )
    finally:
        llm.close()


def table(scores: Mapping[str, Score]) -> str:
    """Markdown; the first row is the reference."""
    reference = next(iter(scores.values()))
    lines = ["| weights | other settings | MB | perplexity | difference |", "|---|---|---|---|---|"]
    for row, found in scores.items():
        result = Perplexity()
        result.add(np.array(found.logprobs))
        difference = Difference.of(found.logprobs, reference.logprobs)
        scheme, *others = row.split(",")
        others = [pair for pair in others if not pair.startswith("dtype=")]
        lines.append(
            f"| {scheme} | {', '.join([found.dtype, *others])} | {found.weight_bytes / 1e6:.1f} "
            f"| {result.value:.4f} ± {result.standard_error:.2f} "
            + ("| |" if found is reference else f"| {100 * difference.value:+.2f} % ± {100 * difference.error:.2f} |")
        )
    return "\n".join(lines)


class Results:
    """Scores that were found already, in a JSON file, by what was scored.

    Args:
        path: None: nothing is kept.

    Raises:
        ConfigError: there is no such folder, or the file is not JSON.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        if path is None:
            return
        if not path.absolute().parent.is_dir():  # found out now, not after the first row
            raise ConfigError(f"--results {path}: no such folder")
        if path.exists():
            try:
                self._found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"--results {path}: {error}") from None

    def get(self, key: str) -> Score | None:
        fields = self._found.get(key)
        return None if fields is None else Score(**{**fields, "logprobs": tuple(fields["logprobs"])})

    def put(self, key: str, score: Score) -> None:
        self._found[key] = asdict(score)
        if self._path is not None:
            self._path.write_text(json.dumps(self._found))


def _key(model: str, settings: Mapping[str, Any], text: str, windowing: Windowing) -> str:
    path = Path(model)
    size = path.stat().st_size if path.is_file() else None
    parts = [path.name, size, dict(settings), asdict(windowing), hashlib.sha256(text.encode()).hexdigest()]
    return json.dumps(parts, sort_keys=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Scores every row of every model that no earlier run has, and prints one table a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to score")
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROW")
    parser.add_argument("--settings", nargs="+", default=(), metavar="SETTING=VALUE", help="for every row")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--max-tokens", type=int, help="use the first N tokens of the text")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="where scores are kept")
    parser.add_argument(
        "--at-most", type=float, metavar="PERCENT", help="fail if a perplexity differs by more from the first row's"
    )
    arguments = parser.parse_args(argv)
    try:
        _run(arguments)
    except (LLMJaxError, OSError) as error:
        print(f"quality: error: {error}", file=sys.stderr)
        return 1
    return 0


class TooFarError(LLMJaxError):
    """A row's perplexity differs too much from that of the first one."""


def check(scores: Mapping[str, Score], *, at_most: float) -> None:
    """Compares all rows with the first one.

    Args:
        at_most: what perplexities may differ by, in percent of the first row's.

    Raises:
        TooFarError: some differ by more, which it names.
    """
    first, reference = next(iter(scores.items()))
    percent = {row: 100 * Difference.of(found.logprobs, reference.logprobs).value for row, found in scores.items()}
    if far := [f"{row} by {change:+.3f} %" for row, change in percent.items() if not abs(change) <= at_most]:
        raise TooFarError(f"perplexities differ by more than {at_most} % from that of {first}: {', '.join(far)}")


def _run(arguments: argparse.Namespace) -> None:
    windowing = Windowing(context=arguments.context, max_tokens=arguments.max_tokens)
    text = arguments.text.read_text(encoding="utf-8")
    results = Results(arguments.results)
    common = engine_settings(arguments.settings)
    rows = {row: {**row_settings(row), **common} for row in arguments.rows}
    print(f"{this_machine()}; llmjax {__version__}, JAX {jax.__version__}; {datetime.now(UTC):%Y-%m-%d}\n")
    for model in arguments.models:
        scores = {}
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for row, settings in rows.items():
                key = _key(model, settings, text, windowing)
                found = results.get(key)
                if found is None:
                    found = pool.apply(score, (model, settings, text, windowing))
                    results.put(key, found)
                scores[row] = found
                print(table(scores).splitlines()[-1], f"{found.seconds:.1f} s", file=sys.stderr, flush=True)
        count = len(next(iter(scores.values())).logprobs)
        print(f"{Path(model).name}, {arguments.text.name}, {count:,} tokens scored, {windowing.describe()}\n")
        print(f"{table(scores)}\n")
        if arguments.at_most is not None:
            check(scores, at_most=arguments.at_most)


if __name__ == "__main__":
    sys.exit(main())
