"""The prompts of a benchmark: random token ids, a JSON-lines file, or ShareGPT conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from llmjax.errors import ConfigError
from llmjax.text_file import read_text

# vLLM's limits for conversations worth measuring.
SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048

FIRST_RANDOM_ID = 256  # below it many vocabularies keep special tokens and bytes
MOST_RANDOM_ID = 10_000  # which most vocabularies have


@dataclass(frozen=True)
class Sample:
    """One request to send.

    Args:
        prompt: text or token ids; of one that ranks texts, the query.
        output_tokens: how many to ask for.
        due: seconds after the first request at which it was sent, if the data set says that.
        more: further texts of a request for vectors, and those that are ranked.
        pictures: data: URLs of pictures beside the prompt.
    """

    prompt: str | list[int]
    output_tokens: int
    due: float | None = None
    more: tuple[str | list[int], ...] = ()
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RandomShape:
    """Lengths of random prompts, in tokens.

    Args:
        range_ratio: lengths are uniform in ``[(1 - r) * len, (1 + r) * len]``; in [0, 1).
        output_range_ratio: the same of the output's lengths; None: as those of the input.
        prefix_len: tokens in front that all prompts share, added to ``input_len``.
        vocab_size: ids lie in [min(256, vocab_size // 2), vocab_size).
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    output_range_ratio: float | None = None
    prefix_len: int = 0
    vocab_size: int = MOST_RANDOM_ID

    def __post_init__(self) -> None:
        for name, low in (("input_len", 1), ("output_len", 1), ("prefix_len", 0), ("vocab_size", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"random {name} must be at least {low}, not {getattr(self, name)}")
        for ratio in (self.range_ratio, self.output_range_ratio or 0.0):
            if not 0 <= ratio < 1:
                raise ConfigError(f"random range_ratio must lie in [0, 1), not {ratio:g}")


def random_samples(count: int, shape: RandomShape, rng: np.random.Generator) -> list[Sample]:
    """Prompts of uniformly random token ids."""

    first = min(FIRST_RANDOM_ID, shape.vocab_size // 2)

    def ids(length: int) -> list[int]:
        return [int(token) for token in rng.integers(first, shape.vocab_size, length)]

    def length(middle: int, ratio: float) -> int:
        low, high = int(middle * (1 - ratio)), int(np.ceil(middle * (1 + ratio)))
        return int(rng.integers(max(low, 1), high + 1))

    prefix, of_input = ids(shape.prefix_len), shape.range_ratio
    of_output = of_input if shape.output_range_ratio is None else shape.output_range_ratio
    return [
        Sample(prefix + ids(length(shape.input_len, of_input)), length(shape.output_len, of_output))
        for _ in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class RepeatedPrefixes:
    """Prompts of which many begin alike.

    Args:
        prefix_len, suffix_len: tokens that a prompt shares with others, and tokens of its own.
        num_prefixes: how many prefixes there are; each begins as many prompts, but for one at most.
    """

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10

    def __post_init__(self) -> None:
        for name, low in (("prefix_len", 0), ("suffix_len", 0), ("num_prefixes", 1)):
            if getattr(self, name) < low:
                flag = f"--prefix-repetition-{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be at least {low}, not {getattr(self, name)}")
        if self.prefix_len + self.suffix_len == 0:
            raise ConfigError("--prefix-repetition-prefix-len and --prefix-repetition-suffix-len: both are 0")


def repeated_prefix_samples(
    count: int, repeated: RepeatedPrefixes, *, output_len: int, vocab_size: int, rng: np.random.Generator
) -> list[Sample]:
    """Prompts of random token ids with common prefixes, in random order."""
    first = min(FIRST_RANDOM_ID, vocab_size // 2)
    prefixes = rng.integers(first, vocab_size, (repeated.num_prefixes, repeated.prefix_len)).tolist()
    suffixes = rng.integers(first, vocab_size, (count, repeated.suffix_len)).tolist()
    samples = [Sample(prefixes[i % len(prefixes)] + suffix, output_len) for i, suffix in enumerate(suffixes)]
    return [samples[int(i)] for i in rng.permutation(count)]


def custom_samples(path: Path, *, output_len: int | None) -> list[Sample]:
    """The prompts of a JSON-lines file: ``{"prompt": text or token ids, "output_tokens": optional number}``.

    Args:
        output_len: tokens to ask for, over what the lines say.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed; the message names the line.
    """
    samples = []
    for number, row in json_lines(path):
        where = f"{path}:{number}"
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not _is_prompt(prompt):
            raise ConfigError(f'{where}: "prompt" must be a text or a list of token ids, and not empty')
        tokens = output_len if output_len is not None else row.get("output_tokens")
        if type(tokens) is not int or tokens < 1:
            raise ConfigError(f'{where}: no "output_tokens" of 1 or more; --output-len gives it for all lines')
        samples.append(Sample(prompt, tokens))
    return not_empty(samples, path)


def sharegpt_samples(path: Path, *, output_len: int | None, count_tokens: Callable[[str], int]) -> list[Sample]:
    """The first question of each ShareGPT conversation, to be answered in as many tokens as it was.

    Args:
        output_len: tokens to ask for, instead of the answer's length.
        count_tokens: how many tokens a text has.

    Raises:
        ConfigError: the file cannot be read or is not a ShareGPT file.
    """
    try:
        rows = json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: a ShareGPT file is a JSON list of conversations")
    samples = []
    for i, row in enumerate(rows):
        try:
            texts = [turn["value"] for turn in row["conversations"][:2]]
        except (KeyError, TypeError):
            raise ConfigError(f'{path}: entry {i} has no "conversations" of turns with a "value"') from None
        if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
            continue  # a conversation of one turn has no answer to measure against
        prompt = count_tokens(texts[0])
        answer = output_len if output_len is not None else count_tokens(texts[1])
        too_short = min(prompt, answer) < SHAREGPT_MIN_TOKENS
        if not too_short and prompt <= SHAREGPT_MAX_PROMPT and prompt + answer <= SHAREGPT_MAX_TOTAL:
            samples.append(Sample(texts[0], answer))
    return not_empty(samples, path)


def pick(
    samples: list[Sample], count: int, rng: np.random.Generator, *, shuffled: bool = True, repeated: bool = True
) -> list[Sample]:
    """``count`` of the samples.

    Args:
        shuffled: in random order; else in their own.
        repeated: as often as needed; else there may be fewer.
    """
    rounds = -(-count // len(samples)) if repeated else 1
    orders = [rng.permutation(len(samples)) if shuffled else np.arange(len(samples)) for _ in range(rounds)]
    return [samples[int(i)] for i in np.concatenate(orders)[:count]]


def batches(samples: list[Sample], size: int, *, query: Sample | None = None) -> list[Sample]:
    """Requests for vectors of ``size`` texts each, or that rank them for a query."""
    groups = [[sample.prompt for sample in samples[at : at + size]] for at in range(0, len(samples), size)]
    first = [] if query is None else [query.prompt]
    return [Sample(texts[0], 0, more=tuple(texts[1:])) for texts in (first + group for group in groups)]


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and value of each line of a file that is not empty; raises ConfigError, which names the line."""
    text = read_text(path)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: is not JSON ({error})") from None


def _is_prompt(value: Any) -> TypeGuard[str | list[int]]:
    is_ids = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    return bool(value) and (isinstance(value, str) or is_ids)


def not_empty(samples: list[Sample], path: Path) -> list[Sample]:
    """The samples; raises ConfigError if there are none."""
    if not samples:
        raise ConfigError(f"{path}: no usable prompt in it")
    return samples
