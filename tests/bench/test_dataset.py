"""Prompts and arrival times of benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.bench.arrivals import arrival_times
from llmjax.bench.dataset import RandomShape, Sample, custom_samples, pick, random_samples, sharegpt_samples
from llmjax.errors import ConfigError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_random_prompts_have_the_lengths_asked_for() -> None:
    samples = random_samples(5, RandomShape(input_len=12, output_len=3, vocab_size=300), rng())
    assert [(len(s.prompt), s.output_tokens) for s in samples] == [(12, 3)] * 5
    assert all(isinstance(token, int) and 150 <= token < 300 for s in samples for token in s.prompt)
    assert samples == random_samples(5, RandomShape(input_len=12, output_len=3, vocab_size=300), rng())
    assert len({tuple(s.prompt) for s in samples}) == 5


def test_random_prompts_share_a_prefix() -> None:
    samples = random_samples(3, RandomShape(input_len=4, prefix_len=6), rng())
    assert {tuple(s.prompt[:6]) for s in samples} == {tuple(samples[0].prompt[:6])}
    assert {len(s.prompt) for s in samples} == {10}


@given(st.integers(1, 50), st.floats(0, 0.99))
def test_random_lengths_stay_in_their_range(length: int, ratio: float) -> None:
    for sample in random_samples(4, RandomShape(input_len=length, output_len=length, range_ratio=ratio), rng()):
        for found in (len(sample.prompt), sample.output_tokens):
            assert max(1, math.floor(length * (1 - ratio))) <= found <= math.ceil(length * (1 + ratio))


@pytest.mark.parametrize("changes", [{"input_len": 0}, {"range_ratio": 1.0}, {"vocab_size": 0}, {"prefix_len": -1}])
def test_impossible_shapes(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"random {next(iter(changes))} must"):
        RandomShape(**changes)  # type: ignore[arg-type]


def test_custom_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hi", "output_tokens": 3}\n\n{"prompt": [1, 2], "output_tokens": 4}\n')
    assert custom_samples(path, output_len=None) == [Sample("hi", 3), Sample([1, 2], 4)]
    assert custom_samples(path, output_len=9) == [Sample("hi", 9), Sample([1, 2], 9)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: is not JSON"),
        ("[1]", ':2: "prompt" must be a text or a list of token ids, and not empty'),
        ('{"prompt": ""}', ':2: "prompt" must be'),
        ('{"prompt": [1, "a"]}', ':2: "prompt" must be'),
        ('{"prompt": "a"}', ':2: no "output_tokens" of 1 or more'),
        ('{"prompt": "a", "output_tokens": true}', ':2: no "output_tokens"'),
    ],
)
def test_bad_custom_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine", "output_tokens": 1}\n' + line)
    with pytest.raises(ConfigError) as error:
        custom_samples(path, output_len=None)
    assert str(error.value).startswith(str(path) + message)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        custom_samples(tmp_path / "none.jsonl", output_len=1)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no usable prompt"):
        custom_samples(tmp_path / "empty.jsonl", output_len=1)


def test_sharegpt(tmp_path: Path) -> None:
    def talk(*turns: str) -> dict[str, object]:
        return {"conversations": [{"from": "any", "value": turn} for turn in turns]}

    rows = [
        talk("a b c d", "e f g h i", "ignored"),
        talk("too short", "e f g h i"),
        talk("no answer here at all"),
        talk("x " * 1025, "e f g h"),
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(rows))
    found = sharegpt_samples(path, output_len=None, count_tokens=lambda text: len(text.split()))
    assert found == [Sample("a b c d", 5)]
    path.write_text('[{"id": 1}]')
    with pytest.raises(ConfigError, match='entry 0 has no "conversations"'):
        sharegpt_samples(path, output_len=None, count_tokens=len)


def test_pick_repeats_a_small_set_evenly() -> None:
    samples = [Sample("a", 1), Sample("b", 1), Sample("c", 1)]
    picked = pick(samples, 7, rng())
    assert len(picked) == 7
    assert all(picked.count(sample) in (2, 3) for sample in samples)
    assert len(pick(samples, 2, rng())) == 2


def test_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, rate=math.inf, burstiness=1, rng=rng()).tolist() == [0, 0, 0]


@given(st.integers(1, 200), st.floats(0.1, 100), st.floats(0.05, 20))
def test_arrivals_rise_and_end_on_time(count: int, rate: float, burstiness: float) -> None:
    times = arrival_times(count, rate=rate, burstiness=burstiness, rng=rng())
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    for shape in (0.25, 1.0, 4.0):
        gaps = np.diff(arrival_times(20_000, rate=10, burstiness=shape, rng=rng()))
        assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)
