"""What the gauge counts is what a parser finds, however the text is cut and whatever its strings hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.serve.errors import ApiError
from llmjax.serve.json_gauge import JsonGauge
from llmjax.serve.limits import BodyLimits

strings = st.text(alphabet=st.sampled_from('a"\\{}[],: é\u2028😀\n'), max_size=6)
json_values = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | strings,
    lambda inner: st.lists(inner, min_size=1, max_size=4) | st.dictionaries(strings, inner, min_size=1, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Values, nodes and depth."""
    match value:
        case dict():
            inner, nodes = list(value.values()), 1 + len(value)
        case list():
            inner, nodes = value, 1
        case _:
            return 1, 0, 0
    below = [counted(v) for v in inner]
    return 1 + sum(b[0] for b in below), nodes + sum(b[1] for b in below), 1 + max(b[2] for b in below)


def gauge(text: bytes, *, cuts: int = 1, **limits: int) -> JsonGauge:
    found = JsonGauge(BodyLimits(bytes=len(text), **limits))
    for start in range(0, len(text), max(1, len(text) // cuts)):
        found.feed(text[start : start + max(1, len(text) // cuts)])
    return found


@given(value=json_values, ascii=st.booleans(), indent=st.sampled_from([None, 1]), cuts=st.integers(1, 40))
@settings(max_examples=400)
def test_counts_are_a_parsers(value: Any, ascii: bool, indent: int | None, cuts: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    found = gauge(text, cuts=cuts)
    assert (found.values, found.nodes, found.depth) == counted(value)


@given(text=st.binary(max_size=60) | st.text('"\\{}[],:a', max_size=60).map(str.encode), cuts=st.integers(1, 60))
def test_cuts_change_nothing(text: bytes, cuts: int) -> None:
    one, many = gauge(text), gauge(text, cuts=cuts)
    assert (one.values, one.nodes, one.depth) == (many.values, many.nodes, many.depth)


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6), cuts=st.integers(1, 60))
def test_the_largest_field_is_named(sizes: list[int], cuts: int) -> None:
    body = {f"field{i}": [7] * size for i, size in enumerate(sizes)}
    found = gauge(json.dumps(body).encode(), cuts=cuts, values=1)
    with pytest.raises(ApiError) as error:
        found.check()
    largest = max(sizes)
    if 2 * largest >= counted_loosely(sizes):
        assert error.value.param == f"field{sizes.index(largest)}"
        assert f"has {max(largest, 1)} entries" in error.value.message
    else:
        assert error.value.param is None


def counted_loosely(sizes: list[int]) -> int:
    """Values of the body in the test above; an empty array counts as one with an entry, which nothing tells apart."""
    return 1 + sum(1 + max(size, 1) for size in sizes)


def test_within_its_limits_nothing_is_refused() -> None:
    text = b'{"a": [1, 2, {"b": [3]}]}'  # 7 values, 6 nodes, 4 deep
    gauge(text, values=7, nodes=6, depth=4).check()
    for limit in ({"values": 6}, {"nodes": 5}, {"depth": 3}):
        with pytest.raises(ApiError) as error:
            gauge(text, **limit).check()
        assert error.value.status == 400


def test_a_long_name_is_cut() -> None:
    text = json.dumps({"k" * 150: [0] * 9}).encode()
    with pytest.raises(ApiError) as error:
        gauge(text, values=3).check()
    assert error.value.param == "k" * 100 + "…"
