"""C++ sampling against the noise of every token: the same tokens, whatever is filtered."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.cpu import sampling as cpu
from llmjax.kernels.cpu.library import library
from llmjax.sampling.draw import draw
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.sampler import TOKENS, SamplingBatch, tokens_by_scores
from llmjax.sampling.settings import request_sampling
from llmjax.sampling.state import SamplerState
from tests.kernels.instruction_sets import each_isa

NATIVE = library()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels are not built")

FILTERS = {
    "none": (0.0, 0, 1.0),
    "top-p": (0.0, 0, 0.9),
    "small top-p": (0.0, 0, 0.05),
    "deep top-p": (0.0, 0, 0.99999),
    "top-k": (0.0, 5, 1.0),
    "deep top-k": (0.0, 700, 1.0),
    "too large top-k": (0.0, 5000, 1.0),
    "min-p": (0.03, 0, 1.0),
    "deep min-p": (1e-9, 0, 1.0),
    "all": (0.01, 50, 0.8),
    "all, deep": (1e-8, 900, 0.9999),
}


def sampled(x: np.ndarray, *, temperature: float, filters: tuple[float, int, float]) -> list[list[int]]:
    """By the library and by scores."""
    arguments, expected = by_scores(x.tobytes(), len(x), temperature, filters)
    return [np.asarray(cpu.sample(*arguments)).tolist(), expected]


@lru_cache(maxsize=1)
def by_scores(
    content: bytes, rows: int, temperature: float, filters: tuple[float, int, float]
) -> tuple[tuple[jax.Array, ...], list[int]]:
    """Arguments, and what scores make of them; the same for all instruction sets."""
    min_p, top_k, top_p = filters
    keys = np.random.default_rng(7).integers(0, 1 << 32, (rows, 2), dtype=np.uint32)
    arguments = (
        jnp.asarray(np.frombuffer(content, np.float32).reshape(rows, -1)),
        jnp.asarray(keys),
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, min_p, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p, jnp.float32),
    )
    x, keys, temperature, low, most, mass = arguments
    expected = draw(x, keys=keys, temperature=temperature, min_p=low, top_k=most, top_p=mass)
    return arguments, expected.tolist()


@each_isa
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_the_same_tokens(isa: str, name: str, spread: float) -> None:
    x = np.random.default_rng(3).standard_normal((200, 1009)).astype(np.float32) * np.float32(spread)
    found, expected = sampled(x, temperature=0.8, filters=FILTERS[name])
    # Sums in another order may move a floor past a token, a last bit of the noise may change a near tie.
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1


@each_isa
@pytest.mark.parametrize("name", FILTERS)
def test_rows_that_are_not_ordinary(isa: str, name: str) -> None:
    x = np.full((8, 77), -np.inf, np.float32)
    x[1, 5] = np.nan
    x[2, 76] = 3.0
    x[3, [1, 70]] = np.inf
    x[4] = 2.0
    x[5] = 0.0
    x[5, 9] = np.nan
    x[6, :60] = np.linspace(-3e38, 3e38, 60)
    x[7, [0, 64]] = 1.0
    found, expected = sampled(x, temperature=1.0, filters=FILTERS[name])
    assert found == expected
    assert found[0] == found[1] == found[5] == 0 and found[2] == 76 and found[3] in (1, 70) and found[6] == 59


@each_isa
def test_temperature_zero_is_the_most_likely_token(isa: str) -> None:
    x = np.random.default_rng(0).standard_normal((9, 300)).astype(np.float32)
    found, expected = sampled(x, temperature=0.0, filters=FILTERS["top-p"])
    assert found == expected == x.argmax(-1).tolist()


def test_shares_are_those_of_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    rows = 20000
    x = np.tile(np.concatenate([logits, np.full(40, -50, np.float32)]), (rows, 1))
    found, _ = sampled(x, temperature=1.0, filters=FILTERS["none"])
    shares = np.bincount(found, minlength=44)[:4] / rows
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.15, 0.1], atol=4 * (0.25 / rows) ** 0.5)


# --- edits ------------------------------------------------------------------------------------------------------------

ROWS, VOCAB, SLOTS, BANS = 24, 1009, 7, 5
SETTINGS = (
    {"temperature": 0},
    {"temperature": 0, "logit_bias": {3: 4.0}},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": -0.3},
    {"temperature": 0, "repetition_penalty": 0.7, "logit_bias": {9: -100.0}},
    {"temperature": 1.3, "top_k": 40},
)


def edited_rows(*, words: int, drafts: int) -> tuple[jax.Array, ...]:
    """The arguments of `TOKENS`: rows of all settings, of slots that share nothing, padding and rows that do not sample
    among them."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((ROWS, VOCAB)).astype(np.float32) * 3
    x[3, 7], x[4] = np.nan, -np.inf
    bias = rng.standard_normal((SLOTS, VOCAB)).astype(np.float32)
    bias[:, ::3] = -np.inf
    state = SamplerState(
        prompt_seen=jnp.asarray(rng.random((SLOTS, VOCAB)) < 0.3),
        output_count=jnp.asarray(rng.integers(0, 3, (SLOTS, VOCAB)), jnp.uint16),
        logit_bias=jnp.asarray(bias),
        ban_previous=jnp.asarray(rng.integers(0, 2, (SLOTS, BANS)), jnp.int32),
        ban_token=jnp.asarray(rng.integers(0, VOCAB + 1, (SLOTS, BANS)), jnp.int32),
        recent=jnp.zeros((SLOTS, 1), jnp.int32),
        scored=jnp.zeros((SLOTS, 0), jnp.int32),
    )
    packed = [
        request_sampling(
            SamplingParams(**SETTINGS[i % len(SETTINGS)]),  # type: ignore[arg-type]
            vocab_size=VOCAB,
            seed=i,
            bad_words=[(0, 1)] if i % 3 else [],
        ).words
        for i in range(ROWS)
    ]
    slot = np.arange(ROWS) % (SLOTS + 1)  # the last one is that of padding
    batch = SamplingBatch.from_words(
        jnp.asarray(np.stack(packed)),
        slot=jnp.asarray(slot, jnp.int32),
        samples=jnp.asarray((slot < SLOTS) & (np.arange(ROWS) % 5 > 0)),
        position=jnp.arange(ROWS, dtype=jnp.int32),
    )
    last = jnp.asarray(rng.integers(0, 2, ROWS), jnp.int32)
    mask = jnp.asarray(rng.integers(-(2**31), 2**31, (ROWS, words)), jnp.int32) if words else None
    uncounted = jnp.asarray(rng.integers(VOCAB - 30, VOCAB + 1, (ROWS, drafts)), jnp.int32) if drafts else None
    return jnp.asarray(x), state, batch, last, mask, uncounted  # type: ignore[return-value]


@each_isa
@pytest.mark.parametrize(("words", "drafts"), [(0, 0), (-(-VOCAB // 32), 0), (0, 40)])
def test_rows_are_edited_as_by_arrays(isa: str, words: int, drafts: int) -> None:
    arguments = edited_rows(words=words, drafts=drafts)
    samples = np.asarray(arguments[2].samples)  # type: ignore[attr-defined]
    found, expected = (np.asarray(way(*arguments)) for way in (TOKENS, tokens_by_scores))
    assert samples.sum() > 15
    assert len(set(expected[samples].tolist())) > 12
    assert found[samples].tolist() == expected[samples].tolist()
    assert not found[~samples].any()


def test_no_other_array_has_the_size_of_the_logits() -> None:
    """Temporaries beyond what an arena of glibc holds are mapped and zeroed at every step."""
    arguments = edited_rows(words=0, drafts=0)
    memory = jax.jit(TOKENS).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < arguments[0].nbytes / 2


def test_a_cpu_with_the_library_uses_it() -> None:
    assert TOKENS.pick("cpu", *edited_rows(words=0, drafts=0)).name == "C++"
