"""Prompts of recorded loads: files that say how long prompts were, when they came, or what was asked."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.bench.dataset import FIRST_RANDOM_ID, Sample, json_lines, not_empty
from llmjax.errors import ConfigError

GPT4_COLUMNS = ("Model", "Request tokens", "Response tokens")  # of BurstGPT's files


def burstgpt_samples(path: Path, *, output_len: int | None, vocab_size: int, rng: np.random.Generator) -> list[Sample]:
    """Random prompts of the lengths that a BurstGPT file (CSV) has of GPT-4, of requests that were answered.

    Args:
        output_len: tokens to ask for, instead of the answer's length.
        vocab_size: token ids are below it.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed; the message names the line.
    """
    samples = []
    for number, row in _csv_rows(path):
        lengths = [row[column] for column in GPT4_COLUMNS[1:]]
        if not all(length.isascii() and length.isdecimal() and len(length) < 10 for length in lengths):
            raise ConfigError(f"{path}:{number}: {' and '.join(GPT4_COLUMNS[1:])} must be numbers of tokens")
        asked, answered = map(int, lengths)
        if row["Model"] == "GPT-4" and asked > 0 and answered > 0:
            samples.append(Sample(_ids(asked, vocab_size, rng), output_len or answered))
    return not_empty(samples, path)


def spec_bench_samples(path: Path, *, output_len: int, category: str | None) -> list[Sample]:
    """The first questions of a Spec-Bench file (``{"category": …, "turns": [text, …]}`` lines).

    Args:
        output_len: tokens to ask for.
        category: category whose questions to take; None: all.

    Raises:
        ConfigError: the file cannot be read, a line is malformed, or none has the category.
    """
    samples, categories = [], set()
    for number, row in json_lines(path):
        turns = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            raise ConfigError(f'{path}:{number}: "turns" must be a list that begins with a text')
        categories.add(str(row.get("category")))
        if category in (None, row.get("category")):
            samples.append(Sample(turns[0], output_len))
    if not samples and categories:
        raise ConfigError(f"{path}: no question of category {category!r}; it has {', '.join(sorted(categories))}")
    return not_empty(samples, path)


@dataclass(frozen=True, kw_only=True)
class TraceFields:
    """How the lines of a trace call what they hold, and in which units.

    Args:
        chunk_tokens: tokens that one id of the prompt's chunks stands for.
        seconds: what one unit of time is.
    """

    timestamp: str = "timestamp"
    input_length: str = "input_length"
    output_length: str = "output_length"
    hash_ids: str = "hash_ids"
    chunk_tokens: int = 16
    seconds: float = 1.0


def trace_samples(
    path: Path, fields: TraceFields, *, output_len: int | None, vocab_size: int, seed: int
) -> list[Sample]:
    """The requests of a trace of JSON lines with their times, as Mooncake's: prompts share what their ids share.

    Args:
        output_len: tokens to ask for, instead of the trace's.
        vocab_size: token ids are below it.
        seed: seed of the tokens that a chunk's id stands for.

    Returns:
        Samples in the order of their times, the first at 0.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed; the message names the line.
    """
    samples = []
    for number, row in json_lines(path):
        where = f"{path}:{number}"
        length = _number(row, fields.input_length, where, low=1)
        tokens = output_len or _number(row, fields.output_length, where, low=1)
        due = float(_number(row, fields.timestamp, where, low=0, kinds=(int, float)) * fields.seconds)
        chunks = row.get(fields.hash_ids)
        if not isinstance(chunks, list) or not all(type(chunk) is int and chunk >= 0 for chunk in chunks):
            raise ConfigError(f'{where}: "{fields.hash_ids}" must be a list of ids')
        if len(chunks) * fields.chunk_tokens < length:
            raise ConfigError(f"{where}: {len(chunks)} chunks of {fields.chunk_tokens} tokens are fewer than {length}")
        text: list[int] = []
        for chunk in chunks[: -(-int(length) // fields.chunk_tokens)]:
            text += _ids(fields.chunk_tokens, vocab_size, np.random.default_rng([seed, chunk]))
        samples.append(Sample(text[: int(length)], int(tokens), due=due))
    samples.sort(key=_due)
    first = _due(samples[0]) if samples else 0.0
    return not_empty([Sample(s.prompt, s.output_tokens, due=_due(s) - first) for s in samples], path)


def _due(sample: Sample) -> float:
    return sample.due or 0.0


def _number(row: Any, name: str, where: str, *, low: int, kinds: tuple[type, ...] = (int,)) -> Any:
    value = row.get(name) if isinstance(row, dict) else None
    if value is None or type(value) not in kinds or not low <= value < 2**53:
        raise ConfigError(f'{where}: "{name}" must be a number of {low} or more')
    return value


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in GPT4_COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}: no column {missing[0]!r}")
            for row in rows:
                yield rows.line_num, {name: row[name] or "" for name in GPT4_COLUMNS}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _ids(count: int, vocab_size: int, rng: np.random.Generator) -> list[int]:
    first = min(FIRST_RANDOM_ID, vocab_size // 2)
    return [int(token) for token in rng.integers(first, vocab_size, count)]
