"""Flags that the benchmarks share, and the prompts that they ask for."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmjax.bench.dataset import (
    RandomShape,
    RepeatedPrefixes,
    Sample,
    batches,
    custom_samples,
    pick,
    random_samples,
    repeated_prefix_samples,
    sharegpt_samples,
)
from llmjax.bench.metrics import DEFAULT_LATENCIES, LATENCIES, OBJECTIVES
from llmjax.bench.random_mm import RandomPictures, buckets_of, most_pictures
from llmjax.bench.traces import TraceFields, burstgpt_samples, spec_bench_samples, trace_samples
from llmjax.config import check_values, setting
from llmjax.errors import ConfigError
from llmjax.settings import settings_of

Options = TypeVar("Options")

RANDOM = ("random", "random-mm", "prefix_repetition", "random-rerank")  # data sets that no file holds
FILES = ("custom", "sharegpt", "burstgpt", "spec_bench", "timed_trace")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is reported, and where."""

    output_json: str | None = setting(None, "file for the result as JSON", section="report")
    plot: str | None = setting(None, "draw the distributions of this run as FILE.png and FILE.svg")
    compare: str | None = setting(
        None, "draw it beside this result of --output-json with --save-detailed, with intervals"
    )
    save_detailed: bool = setting(False, "with the figures and the text of every request in it")
    metric_percentiles: Sequence[float] = setting((99.0,), "percentiles of the latencies")

    def __post_init__(self) -> None:
        for percentile in self.metric_percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"--metric-percentiles: {percentile:g} does not lie in [0, 100]")
        if self.compare is not None and self.plot is None:
            raise ConfigError("--compare draws a picture: give --plot FILE too")


@dataclass(frozen=True, kw_only=True)
class LoadReportOptions(ReportOptions):
    """Options of a load on a server, as in vLLM's benchmark."""

    percentile_metrics: Sequence[str] = setting(
        DEFAULT_LATENCIES, f"latencies that are reported: any of {', '.join(LATENCIES)}"
    )
    goodput: Sequence[str] = setting(
        (),
        "ttft:MS, tpot:MS or e2el:MS: count the requests a second that take no longer than all of these",
        several=True,
    )
    save_result: bool = setting(False, "write the result to a file of its own, named after the run")
    append_result: bool = setting(False, "append the result as one line to such a file")
    result_dir: str | None = setting(None, "folder of that file (default: the current one)")
    result_filename: str | None = setting(None, "its name (default: LABEL-RATEqps-MODEL-TIME.json)")
    label: str | None = setting(None, "what the result calls the run (default: the backend)")
    metadata: Sequence[str] = setting((), "KEY=VALUE to note in the result", separator=None, several=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.percentile_metrics:
            if name not in LATENCIES:
                raise ConfigError(f"--percentile-metrics: {name!r} is none of {', '.join(LATENCIES)}")
        self.objectives  # noqa: B018
        pairs(self.metadata, flag="--metadata")
        if self.result_filename is not None and not self.saves:
            raise ConfigError("--result-filename needs --save-result or --append-result")

    @property
    def saves(self) -> bool:
        return self.save_result or self.append_result

    @property
    def objectives(self) -> dict[str, float]:
        """Milliseconds by latency."""
        limits = {}
        for objective in self.goodput:
            name, _, limit = objective.partition(":")
            try:
                limits[name] = float(limit)
            except ValueError:
                limits[name] = math.nan
            if name not in OBJECTIVES or not limits[name] >= 0:
                wanted = ", ".join(f"{name}:MS" for name in OBJECTIVES)
                raise ConfigError(f"--goodput must be {wanted}, with milliseconds, not {objective!r}")
        return limits


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which prompts are sent; names follow vLLM's benchmarks."""

    dataset_name: str = setting(
        "random",
        "where prompts come from",
        choices=(*RANDOM, *FILES),
        section="prompts",
    )
    dataset_path: str | None = setting(
        None,
        'file of a custom data set ({"prompt": …, "output_tokens": …} lines), of ShareGPT conversations, of BurstGPT, '
        "Spec-Bench or of a trace with times",
    )
    num_prompts: int = setting(100, "requests in all")
    disable_shuffle: bool = setting(False, "prompts of a file in its order")
    no_oversample: bool = setting(False, "no prompt of a file twice, though there are fewer then")
    input_len: int = setting(128, "tokens of a random prompt", aliases=("--random-input-len",))
    output_len: int | None = setting(
        None,
        "tokens to ask for (default: 128 after random prompts, 256 after those of Spec-Bench, else what the file says)",
        aliases=(
            "--random-output-len", "--custom-output-len", "--sharegpt-output-len", "--spec-bench-output-len",
            "--prefix-repetition-output-len",
        ),
    )  # fmt: skip
    random_range_ratio: str = setting(
        "0.0",
        "random lengths vary by this share up and down; as JSON, those of prompts and answers by shares of their own: "
        '{"input": 0.2, "output": 0.5}',
    )
    random_prefix_len: int = setting(
        0, "tokens that all random prompts start with, added to their length", aliases=("--prefix-len",)
    )
    random_vocab_size: int = setting(10_000, "random token ids are below this")
    random_batch_size: int = setting(1, "random texts in a request for vectors, documents in one that ranks them")
    random_mm_base_items_per_request: int = setting(1, "random pictures of a request of random-mm")
    random_mm_num_mm_items_range_ratio: float = setting(0.0, "their number varies by this share up and down")
    random_mm_limit_mm_per_prompt: str = setting('{"image": 255, "video": 1}', "the most of them, as JSON")
    random_mm_bucket_config: str = setting(
        "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}",
        "heights, widths and frames of pictures, which have one, and the share of pictures that each has",
    )
    prefix_repetition_prefix_len: int = setting(256, "tokens that prompts of prefix_repetition share with others")
    prefix_repetition_suffix_len: int = setting(256, "tokens of their own")
    prefix_repetition_num_prefixes: int = setting(10, "how many such prefixes there are")
    spec_bench_category: str | None = setting(None, "questions of this category alone (default: all)")
    timed_trace_chunk_hash_size: int = setting(16, "tokens that an id of a trace's prompts stands for")
    timed_trace_sec_multiplier: float = setting(1.0, "seconds that a unit of a trace's times is (0.001: milliseconds)")
    timed_trace_label_timestamp: str = setting("timestamp", "what a trace calls the time of a request")
    timed_trace_label_input_length: str = setting("input_length", "what it calls the tokens of the prompt")
    timed_trace_label_output_length: str = setting("output_length", "what it calls those of the answer")
    timed_trace_label_hash_ids: str = setting("hash_ids", "what it calls the ids of the prompt's chunks")

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("num_prompts", "random_batch_size", "timed_trace_chunk_hash_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.output_len is not None and self.output_len < 1:
            raise ConfigError(f"--output-len must be at least 1, not {self.output_len}")
        if not 0 < self.timed_trace_sec_multiplier < math.inf:
            raise ConfigError(
                f"--timed-trace-sec-multiplier must be finite and above 0, not {self.timed_trace_sec_multiplier:g}"
            )
        if (self.dataset_path is None) != self.is_random:
            raise ConfigError(f"--dataset-path goes with --dataset-name {', '.join(FILES[:-1])} or {FILES[-1]}")
        self.shape()
        self.prefixes()
        self.pictures()

    @property
    def is_random(self) -> bool:
        """Nothing of it has been written by anybody."""
        return self.dataset_name in RANDOM

    @property
    def has_lengths(self) -> bool:
        """Answers of these lengths are what is measured, whatever they say."""
        return self.dataset_name in ("random", "random-mm", "timed_trace")

    def shape(self, vocab_size: int | None = None) -> RandomShape:
        """Lengths of random prompts, with ids below the model's vocabulary size where it is known."""
        of_input, of_output = range_ratios(self.random_range_ratio)
        return RandomShape(
            input_len=self.input_len,
            output_len=self.output_len or 128,
            range_ratio=of_input,
            output_range_ratio=of_output,
            prefix_len=self.random_prefix_len,
            vocab_size=self._ids_below(vocab_size),
        )

    def prefixes(self) -> RepeatedPrefixes:
        """The prompts of prefix_repetition."""
        return RepeatedPrefixes(
            prefix_len=self.prefix_repetition_prefix_len,
            suffix_len=self.prefix_repetition_suffix_len,
            num_prefixes=self.prefix_repetition_num_prefixes,
        )

    def pictures(self) -> RandomPictures:
        """The pictures of random-mm."""
        return RandomPictures(
            base_items=self.random_mm_base_items_per_request,
            range_ratio=self.random_mm_num_mm_items_range_ratio,
            most=most_pictures(self.random_mm_limit_mm_per_prompt),
            buckets=buckets_of(self.random_mm_bucket_config),
        )

    def samples(
        self, *, seed: int, count_tokens: Callable[[str], int], vocab_size: int | None = None, extra: int = 0
    ) -> list[Sample]:
        """The requests, always the same for the same seed.

        Args:
            count_tokens: how many tokens a text has.
            vocab_size: size of the model's vocabulary, if it is known.
            extra: further requests at the end, for a warm-up.

        Returns:
            ``extra`` and ``num_prompts`` of them, or fewer if the file has fewer and none may come twice.

        Raises:
            ConfigError: the file cannot be read or is malformed.
        """
        rng, count, below = np.random.default_rng(seed), self.num_prompts + extra, self._ids_below(vocab_size)
        if self.dataset_path is None:
            return self._random(rng, below, extra=extra)
        samples = self._of_file(Path(self.dataset_path), rng, below, seed=seed, count_tokens=count_tokens)
        if self.dataset_name == "timed_trace":
            timed = samples[: self.num_prompts]
            return timed + [samples[i % len(samples)] for i in range(extra)]
        if self.no_oversample:
            chosen = pick(samples, self.num_prompts, rng, shuffled=not self.disable_shuffle, repeated=False)
            return chosen + [samples[i % len(samples)] for i in range(extra)]
        return pick(samples, count, rng, shuffled=not self.disable_shuffle)

    def _random(self, rng: np.random.Generator, below: int, *, extra: int) -> list[Sample]:
        count = self.num_prompts + extra * self.random_batch_size
        if self.dataset_name == "prefix_repetition":
            tokens = self.output_len or 128
            return repeated_prefix_samples(count, self.prefixes(), output_len=tokens, vocab_size=below, rng=rng)
        if self.dataset_name == "random-rerank":
            half = dataclasses.replace(self.shape(below), input_len=max(1, self.input_len // 2))
            (query,) = random_samples(1, half, rng)
            return batches(random_samples(count, half, rng), self.random_batch_size, query=query)
        samples = random_samples(count, self.shape(below), rng)
        if self.dataset_name == "random-mm":
            return self.pictures().added_to(samples, rng)
        return samples if self.random_batch_size == 1 else batches(samples, self.random_batch_size)

    def _of_file(
        self, path: Path, rng: np.random.Generator, below: int, *, seed: int, count_tokens: Callable[[str], int]
    ) -> list[Sample]:
        match self.dataset_name:
            case "custom":
                return custom_samples(path, output_len=self.output_len)
            case "burstgpt":
                return burstgpt_samples(path, output_len=self.output_len, vocab_size=below, rng=rng)
            case "spec_bench":
                tokens = self.output_len or 256
                return spec_bench_samples(path, output_len=tokens, category=self.spec_bench_category)
            case "timed_trace":
                fields = TraceFields(
                    timestamp=self.timed_trace_label_timestamp,
                    input_length=self.timed_trace_label_input_length,
                    output_length=self.timed_trace_label_output_length,
                    hash_ids=self.timed_trace_label_hash_ids,
                    chunk_tokens=self.timed_trace_chunk_hash_size,
                    seconds=self.timed_trace_sec_multiplier,
                )
                return trace_samples(path, fields, output_len=self.output_len, vocab_size=below, seed=seed)
        return sharegpt_samples(path, output_len=self.output_len, count_tokens=count_tokens)

    def _ids_below(self, vocab_size: int | None) -> int:
        return min(self.random_vocab_size, vocab_size or self.random_vocab_size)


def range_ratios(text: str) -> tuple[float, float]:
    """``--random-range-ratio``: of the input, and of the output.

    Raises:
        ConfigError: it is neither a number nor an object of the two.
    """
    with suppress(ValueError):
        return float(text), float(text)
    with suppress(ValueError):
        parsed = json.loads(text)
        if isinstance(parsed, dict) and parsed.keys() == {"input", "output"}:
            ratios = parsed["input"], parsed["output"]
            if all(isinstance(ratio, int | float) and not isinstance(ratio, bool) for ratio in ratios):
                return float(ratios[0]), float(ratios[1])
    raise ConfigError(f'--random-range-ratio must be a number or {{"input": NUMBER, "output": NUMBER}}, not {text!r}')


def pairs(texts: Sequence[str], *, flag: str) -> dict[str, str]:
    """``KEY=VALUE`` texts as a mapping.

    Raises:
        ConfigError: one is none.
    """
    parts = [text.partition("=") for text in texts]
    for (name, equals, _), text in zip(parts, texts, strict=True):
        if not name or not equals:
            raise ConfigError(f"{flag} must be KEY=VALUE, not {text!r}")
    return {name: value for name, _, value in parts}


def options_of(cls: type[Options], values: argparse.Namespace) -> Options:
    """The options that the flags give.

    Raises:
        ConfigError: a value is out of range.
    """
    return cls(**{name: getattr(values, name) for name in settings_of(cls) if hasattr(values, name)})


def as_setup(*options: Any) -> dict[str, Any]:
    """The options as JSON fields of a result, so that it says what was measured."""
    fields = {key: value for group in options for key, value in dataclasses.asdict(group).items()}
    return {key: "inf" if value == math.inf else value for key, value in fields.items()}  # JSON has no infinity
