from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.errors import InvalidRequest
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.settings import MAX_BANS, SETTINGS, Feature, RequestSampling, request_sampling

V = 100


def resolve(*, seed: int = 0, eos_ids: tuple[int, ...] = (), bad_words: Any = (), **params: Any) -> RequestSampling:
    return request_sampling(SamplingParams(**params), vocab_size=V, seed=seed, eos_ids=eos_ids, bad_words=bad_words)


@pytest.mark.parametrize(
    ("params", "features"),
    [
        ({"temperature": 0}, Feature(0)),
        ({"temperature": 1e-6, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, Feature(0)),
        ({}, Feature.RANDOM),
        ({"top_k": V}, Feature.RANDOM),
        ({"top_k": -1, "top_p": 1 - 1e-12}, Feature.RANDOM),
        ({"top_k": V - 1}, Feature.RANDOM | Feature.FILTER),
        ({"top_p": 0.9}, Feature.RANDOM | Feature.FILTER),
        ({"min_p": 0.1}, Feature.RANDOM | Feature.FILTER),
        ({"temperature": 0, "presence_penalty": 0.1}, Feature.PENALTY),
        ({"temperature": 0, "frequency_penalty": -0.1}, Feature.PENALTY),
        ({"temperature": 0, "repetition_penalty": 1.1}, Feature.PENALTY),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, Feature.BIAS),
        ({"temperature": 0, "logit_bias": {}}, Feature(0)),
        ({"temperature": 0, "allowed_token_ids": [3]}, Feature.BIAS),
        ({"temperature": 0, "min_tokens": 3, "stop_token_ids": [1]}, Feature.BIAS),
        ({"temperature": 0, "min_tokens": 3}, Feature(0)),  # no stop id to forbid
        ({"temperature": 0, "bad_words": [[5]]}, Feature.BIAS),
        ({"temperature": 0, "bad_words": [[5, 6]]}, Feature.BAN),
        ({"temperature": 0, "logprobs": 0}, Feature.LOGPROBS),
    ],
)
def test_features(params: dict[str, Any], features: Feature) -> None:
    got = resolve(**params)
    assert got.features == features
    assert got.uses_slot == bool(features & (Feature.PENALTY | Feature.BIAS | Feature.BAN))


def test_another_seed_changes_the_key_alone() -> None:
    asked: dict[str, Any] = {"temperature": 0.5, "allowed_token_ids": [1, 2], "bad_words": [(3, 4)], "min_tokens": 2}
    first, other = resolve(seed=7, eos_ids=(2,), **asked), resolve(seed=2**63 + 5, eos_ids=(2,), **asked)
    again = first.with_seed(2**63 + 5)
    np.testing.assert_array_equal(again.words, other.words)
    assert again.bias_ids is first.bias_ids and again.features == other.features and not again.words.flags.writeable


def test_words_hold_the_settings() -> None:
    got = resolve(
        seed=-2, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5,
    )  # fmt: skip
    settings = got.words.view(SETTINGS)[0]
    assert settings["key"].tolist() == [2**32 - 1, 2**32 - 2]
    names = ("temperature", "top_p", "top_k", "min_p", "presence", "frequency", "repetition", "features")
    assert [settings[name].item() for name in names] == [0.5, 0.25, 7, 0.125, 1, -1, 1.5, int(got.features)]
    assert not got.words.flags.writeable


def test_bias_joins_allowed_ids_bias_and_one_token_words() -> None:
    got = resolve(allowed_token_ids=[1, 2, 3], logit_bias={2: 1.5, 9: 4.0}, bad_words=[[3], [4]])
    assert got.bias_fill == -np.inf
    values = dict(zip(got.bias_ids.tolist(), got.bias_values.tolist(), strict=True))
    assert values == {1: 0.0, 2: 1.5, 3: -np.inf, 4: -np.inf}


def test_min_tokens_forbids_stops_and_remembers_their_bias() -> None:
    got = resolve(min_tokens=2, stop_token_ids=[7], logit_bias={7: 2.0}, eos_ids=(8, V + 1))
    assert got.stop_ids.tolist() == [7, 8] and got.stop_values.tolist() == [2.0, 0.0]
    ignoring = resolve(min_tokens=2, stop_token_ids=[7], eos_ids=(8,), ignore_eos=True)
    assert ignoring.stop_ids.tolist() == [7]
    limited = resolve(min_tokens=2, eos_ids=(8,), allowed_token_ids=[5])
    assert limited.stop_values.tolist() == [-np.inf]


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", {"logit_bias": {V: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [V]}),
        ("stop_token_ids", {"stop_token_ids": [V]}),
        ("bad_words", {"bad_words": [[1, V]]}),
        ("bad_words", {"bad_words": [[]]}),
        ("bad_words", {"bad_words": [[i, j] for i in range(20) for j in range(20)]}),
        ("bad_words", {"bad_words": [[1]], "allowed_token_ids": [1]}),
        ("min_tokens", {"min_tokens": 1, "eos_ids": (1,), "allowed_token_ids": [1]}),
        ("min_tokens", {"min_tokens": 1, "eos_ids": (1,), "bad_words": [[i] for i in range(2, V)] + [[0]]}),
    ],
)
def test_impossible_requests_name_the_field(field: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        resolve(**params)
    assert caught.value.field == field


def test_bans_of_a_bad_word() -> None:
    got = resolve(bad_words=[[1, 2], [3, 4, 5], [1, 2], [6, 7, 8, 9]])
    assert got.bans_vary
    assert got.bans([]) == ((1, 2),)
    assert got.bans([0, 3]) == ((1, 2), (4, 5))
    assert got.bans([3, 0]) == ((1, 2),)
    assert got.bans([6, 7]) == ((1, 2), (8, 9))
    assert not resolve(bad_words=[[1, 2]]).bans_vary


@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=4), max_size=6),
    text=st.lists(st.integers(0, 2), min_size=1, max_size=8),
)
def test_bans_are_what_completes_a_word(words: list[list[int]], text: list[int]) -> None:
    sampling = resolve(bad_words=words)
    history = text[:-1]
    banned = {token for previous, token in sampling.bans(history) if previous == text[-1]}
    assert banned == {t for t in range(3) if any([*text, t][-len(w) :] == w for w in words)}
    assert len(sampling.bans(history)) <= MAX_BANS
