"""The sampler against the sampling order written out in float64 NumPy, one row at a time, with sorts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.cpu.library import library
from llmjax.sampling.noise import gumbel, row_keys
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.sampler import SampleOutput, SamplingBatch, _edit, sample
from llmjax.sampling.settings import SETTINGS_WORDS, Feature, RequestSampling, request_sampling
from llmjax.sampling.state import (
    SamplerState,
    add_output_tokens,
    add_prompt_tokens,
    make_sampler_state,
    reset_slot,
    set_bans,
    set_bias,
)

R, V, N, EOS, BANS = 6, 24, 3, 23, 4


@dataclass(frozen=True)
class Row:
    params: SamplingParams
    logits: np.ndarray
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    bad_words: Sequence[tuple[int, ...]] = ()
    seed: int = 0

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.output]


def resolve(row: Row) -> RequestSampling:
    return request_sampling(
        row.params, vocab_size=len(row.logits), seed=row.seed, eos_ids=(EOS,), bad_words=row.bad_words
    )


@partial(jax.jit, static_argnames="max_logprobs")
def step(
    logits: jax.Array,
    state: SamplerState,
    words: jax.Array,
    slot: jax.Array,
    samples: jax.Array,
    position: jax.Array,
    last_token: jax.Array,
    max_logprobs: int = N,
) -> tuple[SampleOutput, SamplerState]:
    batch = SamplingBatch.from_words(words, slot=slot, samples=samples, position=position)
    return sample(logits, state, batch, last_token=last_token, max_logprobs=max_logprobs)


@jax.jit
def admit(
    state: SamplerState,
    slot: jax.Array,
    fill: jax.Array,
    prompt: jax.Array,
    output: jax.Array,
    ids: jax.Array,
    values: jax.Array,
    bans: jax.Array,
) -> SamplerState:
    state = reset_slot(state, slot, fill)
    state = add_prompt_tokens(state, slot, prompt)
    state = add_output_tokens(state, slot, output)
    return set_bans(set_bias(state, slot, ids, values), slot, bans[:, 0], bans[:, 1])


def tables(sampling: RequestSampling, row: Row) -> list[np.ndarray | np.float32]:
    """What ``admit`` writes, padded to the vocabulary."""
    vocab = len(row.logits)
    bias = dict(zip(sampling.bias_ids.tolist(), sampling.bias_values.tolist(), strict=True))
    if len(row.output) < sampling.min_tokens:
        bias |= dict.fromkeys(sampling.stop_ids.tolist(), -np.inf)
    bans = np.full((BANS, 2), (-1, vocab), np.int32)
    for i, pair in enumerate(sampling.bans(row.text[:-1])):
        bans[i] = pair

    def padded(values: Sequence[float], filler: float, dtype: type) -> np.ndarray:
        return np.array([*values, *[filler] * (vocab - len(values))], dtype)

    return [
        np.float32(sampling.bias_fill),
        padded(row.prompt, vocab, np.int32),
        padded(row.output, vocab, np.int32),
        padded(list(bias), vocab, np.int32),
        padded(list(bias.values()), 0, np.float32),
        bans,
    ]


@jax.jit
def edited(logits: jax.Array, state: SamplerState, words: jax.Array, last_token: jax.Array) -> jax.Array:
    """The logits before the temperature; row i in slot i."""
    slot = jnp.arange(len(logits))
    batch = SamplingBatch.from_words(words, slot=slot, samples=slot >= 0, position=slot)

    def uses(feature: Feature) -> jax.Array:
        return jnp.any(batch.has(feature))

    return _edit(logits, state, batch, last_token=last_token, uncounted=None, uses=uses)


def run(rows: Sequence[Row], *, slots: Sequence[int] | None = None, size: int = R) -> tuple[SampleOutput, SamplerState]:
    """Admits the rows and takes one step of ``size`` rows; the rest is padding."""
    slots = list(range(len(rows))) if slots is None else list(slots)
    pad = size - len(rows)
    vocab = len(rows[0].logits)
    state = make_sampler_state(num_slots=size, vocab_size=vocab, max_bans=BANS)
    words = np.zeros((size, SETTINGS_WORDS), np.int32)
    for i, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        sampling = resolve(row)
        words[i] = sampling.words
        if sampling.uses_slot:
            state = admit(state, np.int32(slot), *tables(sampling, row))
    return step(
        np.stack([row.logits for row in rows] + [np.zeros(vocab, np.float32)] * pad),
        state,
        words,
        np.array(slots + [size] * pad, np.int32),
        np.array([True] * len(rows) + [False] * pad),
        np.array([len(row.text) for row in rows] + [0] * pad, np.int32),
        np.array([row.text[-1] for row in rows] + [0] * pad, np.int32),
    )


def edited_reference(row: Row) -> np.ndarray:
    """float64 [V]: everything before the temperature."""
    params = row.params
    x = row.logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(len(x)), params.allowed_token_ids)] = -np.inf
    for word in row.bad_words:
        head = list(word[:-1])
        if not head or row.text[-len(head) :] == head:
            x[word[-1]] = -np.inf
    if len(row.output) < params.min_tokens:
        x[[*params.stop_token_ids, EOS]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(row.text):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(row.output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def kept_reference(x: np.ndarray, params: SamplingParams, top_p: float) -> np.ndarray:
    """bool [V]: survivors of min-p, top-k and top-p; equal logits stand or fall together."""
    p = np.exp((x - x.max()) / params.temperature)
    keep = p >= params.min_p
    if 0 < params.top_k < len(x):
        keep &= x >= np.sort(x)[::-1][params.top_k - 1]
    if params.top_p < 1:
        p = np.where(keep, p, 0) / p[keep].sum()
        levels = np.unique(p[keep])[::-1]
        mass = np.array([p[p >= level].sum() for level in levels])
        keep &= p >= levels[min(np.searchsorted(mass, top_p), len(levels) - 1)]
    return keep


def logprobs_reference(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def acceptable(row: Row) -> set[int]:
    """Tokens the row may give: one, unless float32 cannot tell two scores, or a mass and top_p, apart."""
    x = edited_reference(row)
    if np.all(x == -np.inf):
        return {0}
    if row.params.greedy:
        return set(np.flatnonzero(x >= x.max() - 1e-4).tolist())
    key = jnp.asarray([[0, row.seed]], jnp.uint32)
    noise = np.asarray(gumbel(row_keys(key, jnp.asarray([len(row.text)])), V))[0].astype(np.float64)
    found: set[int] = set()
    for top_p in (row.params.top_p * (1 - 1e-5), row.params.top_p * (1 + 1e-5)):
        keep = kept_reference(x, row.params, top_p)
        score = np.where(keep, (x - x.max()) / row.params.temperature + noise, -np.inf)
        found |= set(np.flatnonzero(score >= score.max() - 1e-3).tolist())
    return found


TOKEN = st.integers(0, V - 1)


@st.composite
def logits(draw: st.DrawFn) -> np.ndarray:
    """A coarse grid, so that many tie; often all negative, often with the tokens that penalties meet on top."""
    grid = st.integers(-12, 12).map(lambda n: n / 4)
    values = np.array(draw(st.lists(grid | st.just(-np.inf), min_size=V, max_size=V)), np.float32)
    values[:6] += draw(st.sampled_from([0, 3, 3]))
    return values + np.float32(draw(st.sampled_from([0, 1, -7])))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    off = st.just
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.75, 1e-3, 100.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 10, V, V + 5, -1])),
        top_p=draw(off(1.0) | st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999])),
        min_p=draw(off(0.0) | st.sampled_from([0.05, 0.3])),
        presence_penalty=draw(off(0.0) | st.sampled_from([-1.5, 0.5])),
        frequency_penalty=draw(off(0.0) | st.sampled_from([-0.5, 1.5])),
        repetition_penalty=draw(off(1.0) | st.sampled_from([0.5, 1.25])),
        logit_bias=draw(st.none() | st.dictionaries(TOKEN, st.sampled_from([-100.0, -1.5, 2.25]), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(TOKEN, min_size=1, max_size=V).map(lambda ids: [*ids, 4, 5, 6, 7])),
        stop_token_ids=draw(st.lists(st.integers(0, 3), max_size=2)),
        min_tokens=draw(st.sampled_from([0, 0, 2])),
        logprobs=draw(st.none() | off(N)),
    )
    # Words end below 6, so 6 and 7 are always left.
    word = st.tuples(st.integers(0, 5)) | st.lists(st.integers(0, 5), min_size=2, max_size=3).map(tuple)
    return Row(
        params=params,
        logits=draw(logits()),
        prompt=draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)),
        output=draw(st.lists(st.integers(0, 5), max_size=4)),
        bad_words=draw(st.lists(word, max_size=3)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@settings(max_examples=100)
@given(st.lists(rows(), min_size=1, max_size=R))
def test_batches_agree_with_the_written_order(batch: list[Row]) -> None:
    out, state = run(batch)
    for i, row in enumerate(batch):
        token = int(out.tokens[i])
        assert token in acceptable(row)
        if row.params.logprobs is not None:
            expected = logprobs_reference(row.logits)
            np.testing.assert_allclose(out.logprobs.logprob[i], expected[token], atol=1e-5)
            assert out.logprobs.rank[i] == 1 + np.sum(row.logits > row.logits[token])
            top = np.argsort(-row.logits, kind="stable")[:N]
            assert out.logprobs.top_ids[i].tolist() == top.tolist()
            np.testing.assert_allclose(out.logprobs.top_logprobs[i], expected[top], atol=1e-5)
        p = row.params
        if (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != (0, 0, 1):
            counts = np.bincount([*row.output, token], minlength=V)
            assert state.output_count[i].tolist() == counts.tolist()


@settings(max_examples=100)
@given(st.lists(rows(), min_size=R, max_size=R))
@pytest.mark.slow
def test_logits_are_edited_as_written(batch: list[Row]) -> None:
    state = make_sampler_state(num_slots=R, vocab_size=V, max_bans=BANS)
    sampled = [resolve(row) for row in batch]
    for slot, (row, sampling) in enumerate(zip(batch, sampled, strict=True)):
        state = admit(state, np.int32(slot), *tables(sampling, row))
    got = edited(
        np.stack([row.logits for row in batch]),
        state,
        np.stack([sampling.words for sampling in sampled]),
        np.array([row.text[-1] for row in batch], np.int32),
    )
    np.testing.assert_allclose(got, np.stack([edited_reference(row) for row in batch]), rtol=1e-5, atol=1e-5)


def spread(seed: int, vocab: int = V) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 2


def test_the_same_seed_gives_the_same_token_in_any_batch() -> None:
    for top_p, top_k in ((1.0, 0), (0.8, 0), (0.9, 9)):
        row = Row(SamplingParams(top_p=top_p, top_k=top_k), spread(1), seed=77)
        others = [
            Row(SamplingParams(temperature=i % 3, top_p=0.5, presence_penalty=1.0), spread(i), seed=i) for i in range(5)
        ]
        alone = int(run([row], size=1)[0].tokens[0])
        assert int(run([*others, row])[0].tokens[5]) == alone
        assert int(run([*others[:2], row], slots=[5, 4, 1])[0].tokens[2]) == alone


def test_wide_rows_keep_their_token_beside_rows_that_need_the_deep_search() -> None:
    vocab = 600
    flat = Row(SamplingParams(top_p=0.95), np.zeros(vocab, np.float32) + spread(9, vocab) / 100, seed=1)
    for seed in range(20):
        row = Row(SamplingParams(top_p=0.7), spread(seed, vocab), seed=seed)
        assert run([row], size=2)[0].tokens[0] == run([flat, row], size=2)[0].tokens[1]


def many(params: SamplingParams, logits: np.ndarray, *, rows: int, by_seed: bool) -> np.ndarray:
    """Samples of ``rows`` seeds at one position, or of one seed at ``rows`` positions."""
    words = np.tile(request_sampling(params, vocab_size=len(logits), seed=0).words, (rows, 1))
    count = np.arange(rows, dtype=np.int32)
    if by_seed:
        words[:, 1] = count
    out, _ = step(
        np.tile(logits, (rows, 1)),
        make_sampler_state(num_slots=1, vocab_size=len(logits)),
        words,
        np.zeros(rows, np.int32),
        np.ones(rows, bool),
        np.zeros(rows, np.int32) if by_seed else count,
        np.zeros(rows, np.int32),
    )
    return np.asarray(out.tokens)


@pytest.mark.parametrize("by_seed", [False, True])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.02}])
def test_frequencies_are_the_probabilities(by_seed: bool, settings: dict[str, float]) -> None:
    params, logits, rows = SamplingParams(**settings), spread(3, 12) / 2, 20_000
    tokens = many(params, logits, rows=rows, by_seed=by_seed)
    x = logits.astype(np.float64)
    p = np.where(kept_reference(x, params, params.top_p), np.exp(x / params.temperature), 0)
    expected = p / p.sum() * rows
    observed = np.bincount(tokens, minlength=12)
    assert not observed[expected == 0].any()
    alive = expected > 0
    assert scipy.stats.chisquare(observed[alive], expected[alive]).pvalue > 1e-3
    pairs = np.zeros((12, 12))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    common = np.argsort(-expected)[:3]
    assert scipy.stats.chi2_contingency(pairs[np.ix_(common, common)]).pvalue > 1e-3  # neighbors are independent


@pytest.mark.parametrize(
    ("params", "logits", "allowed"),
    [
        ({"top_p": 1e-30}, [0, 3, 2, 1], {1}),
        ({"top_k": 1}, [0, 3, 2, 1], {1}),
        ({"top_k": 1}, [0, 3, 3, 1], {1, 2}),  # ties with the k-th stay
        ({"min_p": 1.0}, [0, 3, 3, 1], {1, 2}),
        ({"temperature": 1e-3}, [0, 3, 2, 1], {1}),
        ({"temperature": 1e-4, "top_p": 0.5}, [-1e30, 1e30, 0, 1], {1}),
        ({"temperature": 100.0, "top_k": 2}, [0, 3, 2, 1], {1, 2}),
        ({"temperature": 1e38}, [0, 3, -np.inf, 1], {0, 1, 3}),
        ({}, [-np.inf, -np.inf, 5, -np.inf], {2}),
        ({"top_p": 0.5}, [0, np.inf, 5, np.inf], {1, 3}),
        ({"temperature": 0}, [0, np.inf, 5, np.inf], {1}),
        ({"temperature": 0}, [1, 2, 2, 2], {1}),  # lowest id first
        ({"temperature": 0}, [-np.inf] * 4, {0}),
        ({}, [-np.inf] * 4, {0}),
        ({"top_p": 0.5, "top_k": 2, "min_p": 0.1}, [-np.inf] * 4, {0}),
        ({"temperature": 0}, [1, np.nan, 2, 3], {0}),
        ({"top_p": 0.5}, [1, np.nan, 2, 3], {0}),
    ],
)
def test_extremes(params: dict[str, float], logits: list[float], allowed: set[int]) -> None:
    tokens = many(SamplingParams(**params), np.array(logits, np.float32), rows=256, by_seed=True)
    assert set(tokens.tolist()) == allowed


def test_extreme_penalties_and_bias_give_valid_tokens() -> None:
    logits = np.array([0.0, -0.0, np.inf, -np.inf, 3, -3] * 4, np.float32)
    for repetition in (1e-300, 1e300):
        params = SamplingParams(temperature=0, repetition_penalty=repetition, logit_bias={2: 100})
        assert int(run([Row(params, logits, prompt=range(V))])[0].tokens[0]) == 2
    forbidden = SamplingParams(temperature=0, allowed_token_ids=[4])
    assert int(run([Row(forbidden, logits)])[0].tokens[0]) == 4  # +inf is forbidden as well


def test_bfloat16_logits_are_sampled_as_float32() -> None:
    row = Row(SamplingParams(temperature=0, logprobs=2), spread(4))
    logits = jnp.asarray(row.logits, jnp.bfloat16)[None]
    words = request_sampling(row.params, vocab_size=V, seed=0).words[None]
    zero = np.zeros(1, np.int32)
    state = make_sampler_state(num_slots=1, vocab_size=V)
    out, _ = step(logits, state, words, zero, np.ones(1, bool), zero, zero)
    best = int(np.argmax(np.asarray(logits, np.float32)))
    assert int(out.tokens[0]) == best
    np.testing.assert_allclose(
        out.logprobs.logprob[0], logprobs_reference(np.asarray(logits[0], np.float32))[best], atol=1e-5
    )


def test_rows_that_do_not_sample_count_nothing_and_ask_for_nothing() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0, logprobs=1)
    words = request_sampling(params, vocab_size=V, seed=0).words[None]
    zero = np.zeros(1, np.int32)
    state = make_sampler_state(num_slots=1, vocab_size=V)
    out, after = step(spread(5)[None], state, words, zero, np.zeros(1, bool), zero, zero)
    assert not np.asarray(after.output_count).any()
    assert not np.asarray(out.logprobs.top_logprobs).any() and not np.asarray(out.logprobs.rank).any()


def test_output_counts_saturate() -> None:
    words = request_sampling(SamplingParams(temperature=0, frequency_penalty=-1e-9), vocab_size=V, seed=0).words[None]
    zero = np.zeros(1, np.int32)
    state = make_sampler_state(num_slots=1, vocab_size=V)
    full = SamplerState(**{**vars(state), "output_count": jnp.full((1, V), 65535, jnp.uint16)})
    _, after = step(spread(5)[None], full, words, zero, np.ones(1, bool), zero, zero)
    assert np.asarray(after.output_count).min() == 65535


def test_stale_slots_do_not_touch_rows_without_features() -> None:
    """Slot contents are read for rows with features only: the others' may be anything, NaN included."""
    noisy = SamplerState(
        prompt_seen=jnp.ones((R, V), bool),
        output_count=jnp.full((R, V), 9, jnp.uint16),
        logit_bias=jnp.full((R, V), jnp.nan),
        ban_previous=jnp.zeros((R, BANS), jnp.int32),
        ban_token=jnp.tile(jnp.arange(BANS, dtype=jnp.int32), (R, 1)),
        recent=jnp.full((R, 4), 3, jnp.int32),
        scored=jnp.zeros((R, 2), jnp.int32),
    )
    featured = SamplingParams(temperature=0, presence_penalty=1.0, logit_bias={1: 1.0})
    params = [SamplingParams(temperature=0), SamplingParams(top_k=5), featured, SamplingParams(temperature=0)]
    sampled = [request_sampling(p, vocab_size=V, seed=i) for i, p in enumerate(params)]
    sampled.append(request_sampling(SamplingParams(temperature=0), vocab_size=V, seed=0, bad_words=[(0, 1)]))
    logits = np.stack([spread(i) for i in range(R)])
    words = np.stack([*(s.words for s in sampled), np.zeros(SETTINGS_WORDS, np.int32)])
    index, zero, samples = np.arange(R, dtype=np.int32), np.zeros(R, np.int32), np.arange(R) < 5
    out, _ = step(logits, noisy, words, index, samples, zero, zero)
    assert out.tokens[0] == logits[0].argmax() and out.tokens[3] == logits[3].argmax()
    words[[0, 2, 3, 4]] = 0
    clean = make_sampler_state(num_slots=R, vocab_size=V, max_bans=BANS)
    alone, _ = step(logits, clean, words, index, samples, zero, zero)
    assert out.tokens[1] == alone.tokens[1]


def primitives(jaxpr: jax.extend.core.Jaxpr, *, into_cond: bool) -> set[str]:
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in eqn.params.values():
            inner = value if isinstance(value, tuple | list) else (value,)
            if eqn.primitive.name != "cond" or into_cond:
                for part in inner:
                    body = getattr(part, "jaxpr", part)
                    if hasattr(body, "eqns"):
                        found |= primitives(body, into_cond=into_cond)
    return found


def trace(rows: int = 4) -> tuple[jax.stages.Traced, ...]:
    ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
    state = jax.eval_shape(lambda: make_sampler_state(num_slots=rows, vocab_size=512))
    return step.trace(
        jax.ShapeDtypeStruct((rows, 512), jnp.float32),
        state,
        jax.ShapeDtypeStruct((rows, SETTINGS_WORDS), jnp.int32),
        ints,
        jax.ShapeDtypeStruct((rows,), jnp.bool_),
        ints,
        ints,
    )


def test_without_features_only_the_argmax_runs() -> None:
    jaxpr = trace().jaxpr.jaxpr
    heavy = {"sort", "top_k", "exp", "log", "log1p", "while", "scan", "threefry2x32", "random_bits", "div", "argmax"}
    assert {"exp", "log1p", "scan", "top_k"} <= primitives(jaxpr, into_cond=True)
    always = primitives(jaxpr, into_cond=False)
    assert not heavy & always
    # Three conds: tokens, logprobs and windows of penalties; branch 0 is what runs when no row asks for anything.
    tokens, logprobs, windows = (e for e in jaxpr.eqns if e.primitive.name == "cond")
    assert not heavy & primitives(tokens.params["branches"][0].jaxpr, into_cond=True)
    assert not primitives(windows.params["branches"][0].jaxpr, into_cond=True)
    assert primitives(logprobs.params["branches"][0].jaxpr, into_cond=True) <= {"broadcast_in_dim"}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA makes of top-k differs by platform")
def test_nothing_sorts_the_vocabulary() -> None:
    compiled = trace().lower().compile().as_text()
    assert " sort(" not in compiled
    assert ('custom_call_target="llmjax_sample"' if library() else 'custom_call_target="TopK"') in compiled
