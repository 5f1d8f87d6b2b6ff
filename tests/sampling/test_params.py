"""Values out of range are refused by name, at a cost that does not grow with what is asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmjax
from llmjax.errors import InvalidRequest
from llmjax.sampling.params import MAX_WORD_CHARS, RepetitionDetectionParams, SamplingParams


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"allowed_token_ids": [1, -1]}, "-1"),
        ({"allowed_token_ids": [2**31]}, "2147483648"),
        ({"allowed_token_ids": [1, True]}, "True"),
        ({"allowed_token_ids": ["1"]}, "'1'"),
        ({"stop_token_ids": [1.0]}, "1.0"),
        ({"logit_bias": {-1: 1.0}}, "-1"),
        ({"logit_bias": {1: 101}}, "101"),
        ({"logit_bias": {1: 0.5, 2: float("nan")}}, "nan"),
        ({"logit_bias": {1: [2]}}, r"\[2\]"),
        ({"bad_words": ["x" * (MAX_WORD_CHARS + 1)]}, "characters"),
        ({"bad_words": ["x" * (MAX_WORD_CHARS // 2)] * 3}, "characters"),
        ({"stop": ["x" * MAX_WORD_CHARS, "y"]}, "characters"),
        ({"stop": [""]}, "non-empty"),
        ({"bad_words": [1]}, "non-empty"),
        ({"stop": 5}, "stop must be a list"),
        ({"bad_words": b"word"}, "bad_words must be a list"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list"),
        ({"logprob_token_ids": 5}, "logprob_token_ids must be a list"),
        ({"logprob_token_ids": [[1]]}, r"\[1\]"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping"),
        ({"ignore_eos": "false"}, "'false'"),
        ({"skip_special_tokens": None}, "None"),
        ({"output_kind": 2}, "output_kind must be a RequestOutputKind, not 2"),
    ],
)
def test_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as error:
        SamplingParams(**fields)
    assert error.value.field == next(iter(fields))


def test_long_lists_within_their_range_pass() -> None:
    params = SamplingParams(
        allowed_token_ids=range(50_000),
        logit_bias=dict.fromkeys(range(30000), -100),
        stop=["x" * (MAX_WORD_CHARS // 2)] * 2,
        bad_words=["y" * MAX_WORD_CHARS],
    )
    assert len(params.allowed_token_ids or ()) == 50_000 and len(params.logit_bias or {}) == 30_000


def test_a_form_under_its_older_name() -> None:
    """The name that vLLM's users write."""
    form = llmjax.GuidedDecodingParams(regex="a+", backend="xgrammar")
    params = llmjax.SamplingParams(guided_decoding=form)
    assert params.structured_outputs is form and isinstance(form, llmjax.StructuredOutputsParams)
    changed = dataclasses.replace(params, n=2)
    assert (changed.n, changed.structured_outputs) == (2, form)
    assert params == llmjax.SamplingParams(structured_outputs=form)
    with pytest.raises(InvalidRequest, match=r"guided_decoding is structured_outputs; give one of them") as caught:
        llmjax.SamplingParams(guided_decoding=form, structured_outputs=form)
    assert caught.value.field == "guided_decoding"
    with pytest.raises(InvalidRequest, match=r"^guided_decoding has both json and regex"):
        llmjax.GuidedDecodingParams(json={}, regex="a")


@given(
    tokens=st.lists(st.integers(0, 2), max_size=24),
    start=st.integers(0, 4),
    least=st.integers(0, 5),
    more=st.integers(0, 3),
    count=st.integers(2, 4),
)
def test_repetition_is_what_stands_several_times_at_the_end(
    tokens: list[int], start: int, least: int, more: int, count: int
) -> None:
    params = RepetitionDetectionParams(max_pattern_size=least + more, min_pattern_size=least, min_count=count)
    said = tokens[start:]
    patterns = [
        said[len(said) - size :] for size in range(max(least, 1), least + more + 1) if size * count <= len(said)
    ]
    expected = any(said[len(said) - len(pattern) * count :] == pattern * count for pattern in patterns)
    assert params.repeats(tokens, start=min(start, len(tokens))) == expected


def test_repetition_detection_may_be_a_mapping() -> None:
    wanted: Any = {"max_pattern_size": 3, "min_count": 2}
    assert SamplingParams(repetition_detection=wanted).repetition_detection == RepetitionDetectionParams(**wanted)
    for bad in (
        {"size": 3},
        {"max_pattern_size": 3},
        {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2},
        3,
    ):
        with pytest.raises(InvalidRequest) as raised:
            SamplingParams(repetition_detection=bad)  # type: ignore[arg-type]
        assert raised.value.field == "repetition_detection"
