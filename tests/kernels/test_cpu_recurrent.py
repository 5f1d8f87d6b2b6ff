"""The C++ recurrent mixers against the rules token by token, and against XLA's, for every instruction set of this
machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.cpu import recurrent as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.recurrent.channel_delta import CHANNEL_DELTA
from llmjax.kernels.recurrent.channel_delta import by_scan as channel_by_scan
from llmjax.kernels.recurrent.convolution import CONVOLUTION, by_shifts
from llmjax.kernels.recurrent.gated_delta import GATED_DELTA, by_scan
from llmjax.kernels.recurrent.linear_attention import by_scan as linear_by_scan
from llmjax.kernels.recurrent.selective_scan import SELECTIVE_SCAN
from llmjax.kernels.recurrent.selective_scan import by_scan as selective_by_scan
from tests.kernels.instruction_sets import each_isa

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ library is not built")
PAGE, FIRST = 32, 3  # tokens; entries of other layers before


@dataclass(frozen=True)
class Case:
    """Rows are (new tokens, length after them); (0, 0) is an empty row."""

    rows: tuple[tuple[int, int], ...]
    groups: int = 2
    heads: int = 6
    key: int = 5
    value: int = 7
    width: int = 4
    decode: bool = False
    padding: int = 3  # tokens of no row


MIX = ((37, 37), (1, 40), (0, 0), (1, 1), (5, 70), (1, 33), (90, 200), (2, 64))
CASES = {
    "odd sizes": Case(MIX),
    "decodes": Case(((1, 1), (1, 32), (0, 0), (1, 33), (1, 65)), decode=True, padding=0),
    "a single decode": Case(((1, 50),), decode=True, padding=0, key=128, value=64),
    "wide states": Case(MIX, groups=1, heads=2, key=24, value=72),
    "no heads share": Case(MIX, groups=3, heads=3, key=16, value=33, width=2),
    "one token wide": Case(MIX, groups=1, heads=1, key=1, value=1, width=1),
    "many channels": Case(((70, 70), (1, 9)), groups=4, heads=8, key=64, value=100, width=3),
    "nothing but padding": Case(((0, 0), (0, 0))),
}


@lru_cache(maxsize=1)
def batch_of(case: Case) -> tuple[RaggedBatch, int]:
    """Rows on entries of their own, of which two pages that follow each other may share one; and how many there are."""
    counts = [count for count, _ in case.rows]
    table, entry = np.zeros((len(counts), 8), np.int32), 1
    for r, (_, length) in enumerate(case.rows):
        for page in range(-(-length // PAGE)):
            table[r, page] = entry
            entry += page % 3 != 1
        entry += 1
    tokens = len(counts) if case.decode else sum(counts) + case.padding
    batch = RaggedBatch(
        query_start=jnp.asarray(np.arange(len(counts) + 1) if case.decode else np.cumsum([0, *counts]), jnp.int32),
        kv_len=jnp.asarray([length for _, length in case.rows], jnp.int32),
        page_table=jnp.asarray(table),
        kv_index=jnp.zeros(tokens, jnp.int32),
        first_page=jnp.int32(FIRST),
        decode=case.decode,
    )
    return batch, FIRST + entry + 1


def spans(case: Case) -> list[tuple[int, slice, int]]:
    """Rows with tokens: number, tokens, and the first one's position."""
    starts = np.asarray(batch_of(case)[0].query_start)
    rows = [(r, slice(starts[r], starts[r] + count), length - count) for r, (count, length) in enumerate(case.rows)]
    return [(r, tokens, position) for r, tokens, position in rows if tokens.stop > tokens.start]


def entry(case: Case, row: int, position: int) -> int:
    return FIRST + int(batch_of(case)[0].page_table[row, position // PAGE])


def random_tokens(case: Case, *, beta: bool, by_channel: bool = False) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    batch, entries = batch_of(case)
    rng, count = np.random.default_rng(1), len(batch.kv_index)
    q, k = (rng.standard_normal((count, case.groups, case.key)) for _ in range(2))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v, decay = rng.standard_normal((count, case.heads, case.value)), -rng.exponential(0.3, (count, case.heads))
    if by_channel:
        q, k = (np.repeat(x, case.heads // case.groups, axis=1) for x in (q, k))
        decay = -rng.exponential(0.3, (count, case.heads, case.key))
    decay[count // 2 :: 7] = -300.0  # everything is forgotten, and ratios of decays overflow
    given = (q, k, v, decay, rng.uniform(0, 1, (count, case.heads))) if beta else (q, k, v, decay)
    states = rng.standard_normal((entries, case.heads, case.key, case.value))
    return tuple(x.astype(np.float32) for x in given), states.astype(np.float32)


def by_token(case: Case, given: tuple[np.ndarray, ...], states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rules as they are written, f64; padding tokens read zeros."""
    q, k, v, decay, *beta = (x.astype(np.float64) for x in given)
    q, k = (np.repeat(x, case.heads // x.shape[1], axis=1) for x in (q, k))
    decay = decay.reshape(*decay.shape[:2], -1)  # of a head, or of each of its channels
    out, after = np.zeros(v.shape), states.astype(np.float64)
    for row, tokens, position in spans(case):
        state = after[entry(case, row, position - 1)] if position else np.zeros(after.shape[1:])
        for i, t in enumerate(range(tokens.start, tokens.stop)):
            state = np.exp(decay[t])[..., None] * state
            added = v[t]
            if beta:
                added = beta[0][t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * added[:, None]
            out[t] = np.einsum("hk,hkv->hv", q[t], state)
            after[entry(case, row, position + i)] = state
    return out, after


def random_scan(case: Case) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """What `selective_scan` takes; a channel has no more than its own states."""
    batch, entries = batch_of(case)
    rng, count, channels = np.random.default_rng(3), len(batch.kv_index), 5 * case.heads * case.value
    c, b = (rng.standard_normal((count, case.key)) for _ in range(2))
    x, steps = rng.standard_normal((count, channels)), rng.exponential(0.3, (count, channels))
    steps[count // 2 :: 7] = 300.0  # everything is forgotten
    rates, states = -rng.exponential(1.0, (case.key, channels)), rng.standard_normal((entries, 1, case.key, channels))
    x[count // 2 :: 7] *= 0.001
    return tuple(x.astype(np.float32) for x in (c, b, x, steps, rates)), states.astype(np.float32)


def scanned(case: Case, given: tuple[np.ndarray, ...], states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rule of `selective_scan` as it is written, f64; padding tokens read zeros."""
    c, b, x, steps, rates = (x.astype(np.float64) for x in given)
    out, after = np.zeros(x.shape), states.astype(np.float64)
    for row, tokens, position in spans(case):
        state = after[entry(case, row, position - 1)] if position else np.zeros(after.shape[1:])
        for i, t in enumerate(range(tokens.start, tokens.stop)):
            state = np.exp(steps[t] * rates) * state + b[t][:, None] * (steps[t] * x[t])
            out[t] = (c[t][:, None] * state[0]).sum(0)
            after[entry(case, row, position + i)] = state
    return out, after


def check(found: tuple[jax.Array, jax.Array], expected: tuple[np.ndarray, np.ndarray]) -> None:
    for x, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, wanted, rtol=0, atol=3e-5)


@each_isa
@pytest.mark.parametrize("name", CASES)
def test_gated_delta(name: str, isa: str) -> None:
    given, states = random_tokens(CASES[name], beta=True)
    found = cpu.gated_delta(*given, jnp.asarray(states), batch_of(CASES[name])[0], page_size=PAGE)
    check(found, by_token(CASES[name], given, states))


@each_isa
@pytest.mark.parametrize("name", CASES)
def test_linear_attention(name: str, isa: str) -> None:
    given, states = random_tokens(CASES[name], beta=False)
    found = cpu.linear_attention(*given, jnp.asarray(states), batch_of(CASES[name])[0], page_size=PAGE)
    check(found, by_token(CASES[name], given, states))


@each_isa
@pytest.mark.parametrize("name", CASES)
def test_channel_delta(name: str, isa: str) -> None:
    given, states = random_tokens(CASES[name], beta=True, by_channel=True)
    found = cpu.gated_delta(*given, jnp.asarray(states), batch_of(CASES[name])[0], page_size=PAGE)
    check(found, by_token(CASES[name], given, states))


@each_isa
@pytest.mark.parametrize("name", CASES)
def test_selective_scan(name: str, isa: str) -> None:
    given, states = random_scan(CASES[name])
    found = cpu.selective_scan(*given, jnp.asarray(states), batch_of(CASES[name])[0], page_size=PAGE)
    check(found, scanned(CASES[name], given, states))


@each_isa
@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str, isa: str) -> None:
    case = CASES[name]
    batch, entries = batch_of(case)
    rng, channels = np.random.default_rng(2), 11 * case.heads * case.value
    x = rng.standard_normal((len(batch.kv_index), channels)).astype(np.float32)
    weight = rng.standard_normal((channels, case.width)).astype(np.float32)
    states = rng.standard_normal((entries, case.width - 1, channels)).astype(np.float32)
    out, after = np.zeros(x.shape), states.copy()
    for row, tokens, position in spans(case):
        before = states[entry(case, row, position - 1)] if position else np.zeros(states.shape[1:])
        inputs = np.concatenate((before, x[tokens]))
        for i, t in enumerate(range(tokens.start, tokens.stop)):
            out[t] = np.einsum("wc,cw->c", inputs[i : i + case.width], weight)
            after[entry(case, row, position + i)] = inputs[i + 1 : i + case.width]
    check(cpu.causal_convolution(x, weight, jnp.asarray(states), batch, page_size=PAGE), (out, after))


@pytest.mark.parametrize("name", ["odd sizes", "decodes"])
@pytest.mark.parametrize("rule", ["gated delta", "channel delta", "linear attention", "selective scan"])
def test_xla_gives_the_same(rule: str, name: str) -> None:
    """For devices without kernels of their own."""
    case = CASES[name]
    if rule == "selective scan":
        (given, states), way, rules = random_scan(case), selective_by_scan, scanned
    else:
        given, states = random_tokens(case, beta=rule != "linear attention", by_channel=rule == "channel delta")
        way = {"gated delta": by_scan, "channel delta": channel_by_scan, "linear attention": linear_by_scan}[rule]
        rules = by_token
    out, after = jax.jit(partial(way, page_size=PAGE))(*given, jnp.asarray(states), batch_of(case)[0])
    expected, wanted = rules(case, given, states)
    for row, tokens, position in spans(case):
        np.testing.assert_allclose(out[tokens], expected[tokens], rtol=0, atol=3e-5)
        last = entry(case, row, position + tokens.stop - tokens.start - 1)
        np.testing.assert_allclose(after[last], wanted[last], rtol=0, atol=3e-5)


def test_result_of_a_row_does_not_depend_on_the_batch() -> None:
    case = CASES["wide states"]
    given, states = random_tokens(case, beta=True)
    out, _ = cpu.gated_delta(*given, jnp.asarray(states), batch_of(case)[0], page_size=PAGE)
    batch = batch_of(case)[0]
    row, tokens, _ = spans(case)[-2]
    alone = RaggedBatch(
        query_start=jnp.asarray([0, tokens.stop - tokens.start], jnp.int32),
        kv_len=batch.kv_len[row : row + 1],
        page_table=batch.page_table[row : row + 1],
        kv_index=jnp.zeros(tokens.stop - tokens.start, jnp.int32),
        first_page=batch.first_page,
    )
    single, _ = cpu.gated_delta(*(x[tokens] for x in given), jnp.asarray(states), alone, page_size=PAGE)
    np.testing.assert_array_equal(single, out[tokens])


def test_operations_take_them() -> None:
    case = CASES["odd sizes"]
    given, states = random_tokens(case, beta=True)
    assert GATED_DELTA.explain("cpu", *given, states, batch_of(case)[0], page_size=PAGE) == "C++"
    assert GATED_DELTA.explain("cuda", *given, states, batch_of(case)[0], page_size=PAGE) == "XLA"
    given, states = random_tokens(case, beta=True, by_channel=True)
    assert CHANNEL_DELTA.explain("cpu", *given, states, batch_of(case)[0], page_size=PAGE) == "C++"
    given, states = random_scan(case)
    assert SELECTIVE_SCAN.explain("cpu", *given, states, batch_of(case)[0], page_size=PAGE) == "C++"
    x, weight = np.zeros((9, 4), np.float32), np.zeros((4, 300), np.float32)
    said = CONVOLUTION.explain("cpu", x, weight, np.zeros((2, 299, 4)), batch_of(case)[0], page_size=PAGE)
    assert said == "XLA (C++: the convolution is 300 tokens wide, more than 256)"
    assert CONVOLUTION.implementations[-1].run is by_shifts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": [[1], [99]]}, "row 1: entry 102 does not exist"),
        ({"page_table": [[-9], [1]]}, "row 0: entry -6 does not exist"),
        ({"kv_len": [2, 1000]}, "row 1: kv_len 1000 out of range"),
        ({"kv_len": [1, 3]}, "row 0: kv_len 1 out of range"),
        ({"query_start": [0, 2, 9]}, "row 1: query_start out of range"),
        ({"query_start": [2, 0, 5]}, "row 0: query_start out of range"),
    ],
)
def test_wrong_rows_are_errors(changes: dict[str, list[Any]], message: str) -> None:
    fields = {"query_start": [0, 2, 5], "kv_len": [2, 3], "page_table": [[1], [2]], **changes}
    batch = RaggedBatch(
        **{name: jnp.asarray(value, jnp.int32) for name, value in fields.items()},
        kv_index=jnp.zeros(5, jnp.int32),
        first_page=jnp.int32(3),
    )
    x, states = jnp.zeros((5, 8)), jnp.zeros((6, 3, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(cpu.causal_convolution(x, jnp.zeros((8, 4)), states, batch, page_size=PAGE))
