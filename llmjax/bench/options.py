"""Flags that the benchmarks share, and the prompts that they ask for."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmjax.bench.dataset import RandomShape, Sample, custom_samples, pick, random_samples, sharegpt_samples
from llmjax.config import check_choices, setting
from llmjax.errors import ConfigError
from llmjax.settings import settings_of

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is reported, and where."""

    output_json: str | None = setting(None, "file for the result as JSON", section="report")
    save_detailed: bool = setting(False, "with the figures and the text of every request in it")
    metric_percentiles: Sequence[float] = setting((99.0,), "percentiles of the latencies")

    def __post_init__(self) -> None:
        for percentile in self.metric_percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"--metric-percentiles: {percentile:g} does not lie in [0, 100]")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which prompts are sent; names follow vLLM's benchmarks."""

    dataset_name: str = setting(
        "random", "where prompts come from", choices=("random", "custom", "sharegpt"), section="prompts"
    )
    dataset_path: str | None = setting(
        None, 'file of a custom data set ({"prompt": …, "output_tokens": …} lines) or of ShareGPT conversations'
    )
    num_prompts: int = setting(100, "requests in all")
    input_len: int = setting(128, "tokens of a random prompt", aliases=("--random-input-len",))
    output_len: int | None = setting(
        None,
        "tokens to ask for (default: 128 after random prompts, else what the file says)",
        aliases=("--random-output-len", "--custom-output-len", "--sharegpt-output-len"),
    )
    random_range_ratio: float = setting(0.0, "random lengths vary by this share up and down")
    random_prefix_len: int = setting(0, "tokens that all random prompts start with, added to their length")
    random_vocab_size: int = setting(10_000, "random token ids are below this")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts must be at least 1, not {self.num_prompts}")
        if self.output_len is not None and self.output_len < 1:
            raise ConfigError(f"--output-len must be at least 1, not {self.output_len}")
        if (self.dataset_path is None) != (self.dataset_name == "random"):
            raise ConfigError("--dataset-path goes with --dataset-name custom or sharegpt")
        self.shape()

    def shape(self, vocab_size: int | None = None) -> RandomShape:
        """Lengths of random prompts, with ids below the model's vocabulary size where it is known."""
        return RandomShape(
            input_len=self.input_len,
            output_len=self.output_len or 128,
            range_ratio=self.random_range_ratio,
            prefix_len=self.random_prefix_len,
            vocab_size=min(self.random_vocab_size, vocab_size or self.random_vocab_size),
        )

    def samples(
        self, *, seed: int, count_tokens: Callable[[str], int], vocab_size: int | None = None, extra: int = 0
    ) -> list[Sample]:
        """The requests, always the same for the same seed.

        Args:
            count_tokens: how many tokens a text has.
            vocab_size: of the model, if it is known.
            extra: further requests at the end, for a warm-up.

        Raises:
            ConfigError: the file cannot be read or is malformed.
        """
        rng, count = np.random.default_rng(seed), self.num_prompts + extra
        if self.dataset_path is None:
            return random_samples(count, self.shape(vocab_size), rng)
        path = Path(self.dataset_path)
        if self.dataset_name == "custom":
            return pick(custom_samples(path, output_len=self.output_len), count, rng)
        return pick(sharegpt_samples(path, output_len=self.output_len, count_tokens=count_tokens), count, rng)


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
