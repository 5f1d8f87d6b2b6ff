"""Which settings follow from what is known: no machine and no model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.errors import ConfigError
from llmjax.tune.decide import MOST_KV, SPARE, UNIT, fit, threads
from llmjax.tune.facts import Decode, KVType, Memory, Weights

GIB = 2**30


def memory(free: float, weights: list[float], kv_types: list[tuple[float, float]]) -> Memory:
    """Sizes in GiB; the first form of weights is the stored one."""
    schemes = (None, "q8_0", "q4_k_m", "q2_k")
    names = ("auto", "int8")
    return Memory(
        free=int(free * GIB),
        tokens=8192,
        weights=tuple(
            Weights(quantization=name, num_bytes=int(size * GIB)) for name, size in zip(schemes, weights, strict=False)
        ),
        kv_types=tuple(
            KVType(name=name, request_bytes=int(one * GIB), most_bytes=int(most * GIB))
            for name, (one, most) in zip(names, kv_types, strict=False)
        ),
    )


@pytest.mark.parametrize(
    ("free", "scheme", "kv", "kv_gib"),
    [
        (64, None, "auto", 4),  # all fits: a quarter of the memory, 4 GiB at most
        (19, None, "auto", 2.1),  # one request is 1 GiB, and 2.1 GiB are left
        (17.4, None, "int8", 0.66),  # the stored weights leave no room for it in bfloat16
        (16.5, "q8_0", "auto", 4),
        (8, "q4_k_m", "auto", 2),
        (5.2, "q2_k", "auto", 1.18),
        (4.5, "q2_k", "int8", 0.55),
    ],
)
def test_what_loses_least_of_what_fits(free: float, scheme: str | None, kv: str, kv_gib: float) -> None:
    found = fit(memory(free, [15, 8, 5, 3.5], [(1, 100), (0.5, 50)]))
    assert (found.weights.quantization, found.kv.name) == (scheme, kv)
    assert found.kv_bytes / GIB == pytest.approx(kv_gib, abs=0.13)


def test_a_long_request_gets_more_than_the_usual_memory() -> None:
    assert fit(memory(64, [15], [(30, 300)])).kv_bytes == 30 * GIB > MOST_KV


def test_no_more_than_can_be_used() -> None:
    assert fit(memory(64, [15], [(0.1, 0.5)])).kv_bytes == GIB // 2


def test_what_does_not_fit_says_what_is_needed_and_what_there_is() -> None:
    with pytest.raises(ConfigError) as refused:
        fit(memory(3, [15, 8, 5, 3.5], [(1, 100), (0.5, 50)]))
    assert str(refused.value).startswith(
        "the model takes 3,584 MiB for its weights and 512 MiB for a request of 8,192 tokens, and 3,072 MiB of memory "
        "are free; take a smaller model"
    )


@given(st.floats(0.1, 100), st.lists(st.floats(0.1, 50), min_size=1, max_size=4), st.floats(0.01, 20))
def test_what_is_chosen_fits(free: float, weights: list[float], request: float) -> None:
    known = memory(free, sorted(weights, reverse=True), [(request, 8 * request), (request / 2, 4 * request)])
    try:
        found = fit(known)
    except ConfigError:
        smallest = known.weights[-1].num_bytes + known.kv_types[-1].request_bytes
        assert smallest > int(known.free * (1 - SPARE))
        return
    assert found.weights.num_bytes + found.kv_bytes <= max(known.free, found.weights.num_bytes + UNIT)
    assert found.kv_bytes > found.kv.request_bytes - UNIT


def decode(threads: int, step: float) -> Decode:
    return Decode(threads=threads, step=step, attention={})


def test_the_fewest_threads_of_those_that_are_as_fast() -> None:
    assert threads([decode(8, 1.0), decode(4, 1.04), decode(16, 0.99)]).threads == 8
    assert threads([decode(8, 1.0), decode(4, 1.2), decode(16, 0.9)]).threads == 16
    assert threads([decode(8, 1.0), decode(4, 1.01)]).threads == 4
