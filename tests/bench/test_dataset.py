"""Prompts and arrival times of benchmarks."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.bench.arrivals import arrival_times, ramp_rates, times_at
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
from llmjax.bench.options import DatasetOptions
from llmjax.bench.traces import TraceFields, burstgpt_samples, spec_bench_samples, trace_samples
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


def test_prompts_and_answers_may_vary_by_shares_of_their_own() -> None:
    options = DatasetOptions(input_len=100, output_len=100, random_range_ratio='{"input": 0, "output": 0.5}')
    samples = options.samples(seed=1, count_tokens=len)
    assert {len(sample.prompt) for sample in samples} == {100}
    lengths = [sample.output_tokens for sample in samples]
    assert 50 <= min(lengths) < 75 and 125 < max(lengths) <= 150
    assert DatasetOptions(random_range_ratio="0.25").shape().range_ratio == 0.25


@pytest.mark.parametrize("text", ["x", "1", "-0.1", "nan", '{"input": 0.1}', '{"input": 0, "output": "a"}', "[0, 0]"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"range.ratio"):
        DatasetOptions(random_range_ratio=text)


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


def test_pick_in_order_and_not_twice() -> None:
    samples = [Sample(text, 1) for text in "abc"]
    assert pick(samples, 2, rng(), shuffled=False) == samples[:2]
    assert pick(samples, 5, rng(), shuffled=False) == samples + samples[:2]
    assert len(pick(samples, 5, rng(), repeated=False)) == 3


def test_repeated_prefixes() -> None:
    repeated = RepeatedPrefixes(prefix_len=6, suffix_len=3, num_prefixes=4)
    samples = repeated_prefix_samples(10, repeated, output_len=5, vocab_size=500, rng=rng())
    assert [(len(s.prompt), s.output_tokens) for s in samples] == [(9, 5)] * 10
    counts = Counter(tuple(s.prompt[:6]) for s in samples)
    assert sorted(counts.values()) == [2, 2, 3, 3]
    assert len({tuple(s.prompt[6:]) for s in samples}) == 10


def test_texts_in_one_request() -> None:
    samples = [Sample(text, 9) for text in "abcde"]
    assert batches(samples, 2) == [Sample("a", 0, more=("b",)), Sample("c", 0, more=("d",)), Sample("e", 0)]
    assert batches(samples, 3, query=Sample("q", 1))[1] == Sample("q", 0, more=("d", "e"))


def test_burstgpt(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "5,ChatGPT,9,9,18,API log\n6,GPT-4,4,3,7,API log\n7,GPT-4,5,0,5,API log\n8,GPT-4,2,1,3,API log\n"
    path.write_text(head + rows)
    found = burstgpt_samples(path, output_len=None, vocab_size=300, rng=rng())
    assert [(len(s.prompt), s.output_tokens) for s in found] == [(4, 3), (2, 1)]
    assert burstgpt_samples(path, output_len=7, vocab_size=300, rng=rng())[0].output_tokens == 7
    path.write_text(head + "5,GPT-4,many,1,1,x\n")
    with pytest.raises(ConfigError, match=r"burst.csv:2: Request tokens and Response tokens must be numbers"):
        burstgpt_samples(path, output_len=None, vocab_size=300, rng=rng())
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no column 'Model'"):
        burstgpt_samples(path, output_len=None, vocab_size=300, rng=rng())


def test_spec_bench(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"category": "math", "turns": ["1+1?", "why?"]}, {"category": "qa", "turns": ["who?"]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert spec_bench_samples(path, output_len=5, category=None) == [Sample("1+1?", 5), Sample("who?", 5)]
    assert spec_bench_samples(path, output_len=5, category="qa") == [Sample("who?", 5)]
    with pytest.raises(ConfigError, match="no question of category 'art'; it has math, qa"):
        spec_bench_samples(path, output_len=5, category="art")
    path.write_text('{"turns": []}')
    with pytest.raises(ConfigError, match=':1: "turns" must be a list that begins with a text'):
        spec_bench_samples(path, output_len=5, category=None)


def test_a_trace_has_its_times_and_shares_what_its_ids_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 10, "output_length": 4, "hash_ids": [7, 8, 9]},
        {"timestamp": 1000, "input_length": 6, "output_length": 2, "hash_ids": [7, 5]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    fields = TraceFields(chunk_tokens=4, seconds=0.001)
    early, late = trace_samples(path, fields, output_len=None, vocab_size=500, seed=1)
    assert (early.due, late.due) == (0.0, pytest.approx(2.0))
    assert (len(early.prompt), early.output_tokens, len(late.prompt), late.output_tokens) == (6, 2, 10, 4)
    assert early.prompt[:4] == late.prompt[:4] and early.prompt[4:] != late.prompt[4:6]
    for wrong, said in (
        ({"input_length": 0}, '"input_length" must be a number of 1 or more'),
        ({"output_length": True}, '"output_length" must be'),
        ({"timestamp": None}, '"timestamp" must be a number of 0 or more'),
        ({"hash_ids": ["a"]}, '"hash_ids" must be a list of ids'),
        ({"hash_ids": [1]}, "1 chunks of 4 tokens are fewer than 10"),
    ):
        path.write_text(json.dumps({**rows[0], **wrong}))
        with pytest.raises(ConfigError, match=f":1: {said}"):
            trace_samples(path, fields, output_len=None, vocab_size=500, seed=1)


def test_what_is_for_the_warm_up_comes_on_top(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{letter}", "output_tokens": 1}}\n' for letter in "abc"))
    few = {"dataset_name": "custom", "dataset_path": str(path), "num_prompts": 5}
    lengths = []
    for options in (
        DatasetOptions(**few),
        DatasetOptions(**few, no_oversample=True),
        DatasetOptions(num_prompts=7, random_batch_size=3),
        DatasetOptions(dataset_name="random-rerank", num_prompts=7, random_batch_size=3),
    ):
        lengths.append(len(options.samples(seed=0, count_tokens=len, extra=2)))
    assert lengths == [5 + 2, 3 + 2, 3 + 2, 3 + 2]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", 10**0.5)])
def test_rates_rise(strategy: str, middle: float) -> None:
    rates = ramp_rates(21, strategy=strategy, start=1, end=10)
    assert (rates[0], rates[10], rates[-1]) == (1, pytest.approx(middle), pytest.approx(10))
    times = times_at(ramp_rates(20_000, strategy=strategy, start=10, end=100), burstiness=1, rng=rng())
    gaps = np.diff(times)
    assert gaps[:500].mean() / gaps[-500:].mean() == pytest.approx(10, rel=0.3)
