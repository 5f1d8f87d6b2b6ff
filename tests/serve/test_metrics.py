"""Histogram arithmetic, against prometheus_client's own histogram."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from llmjax.serve.metrics import TOKEN_LATENCY, Histogram, one_two_five


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(TOKEN_LATENCY))))
def test_buckets_equal_the_librarys(values: list[float]) -> None:
    ours = Histogram("", TOKEN_LATENCY)
    ours.observe(*values)
    theirs = Reference("x", "", registry=CollectorRegistry(), buckets=TOKEN_LATENCY)
    for value in values:
        theirs.observe(value)
    (family,) = theirs.collect()
    expected = [(sample.labels["le"], sample.value) for sample in family.samples if sample.name == "x_bucket"]
    assert ours.buckets() == expected
    (total,) = (sample.value for sample in family.samples if sample.name == "x_sum")
    assert ours.sum == total


def test_one_two_five() -> None:
    assert one_two_five(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert one_two_five(1) == (1,)
    assert one_two_five(10) == (1, 2, 5, 10)
