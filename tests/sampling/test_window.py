"""Penalties that look at the last tokens alone, against counts of those tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.engine.device.edits import EDITS
from llmjax.engine.device.slots import SlotEdits, recent_tokens
from llmjax.errors import InvalidRequest
from llmjax.sampling.params import MAX_WINDOW, SamplingParams
from llmjax.sampling.sampler import SamplingBatch, count
from llmjax.sampling.settings import Feature, RequestSampling, request_sampling
from llmjax.sampling.state import SamplerState, make_sampler_state

V, W, S = 7, 8, 3
TOKENS = st.lists(st.integers(0, V - 1), max_size=14)


def resolved(window: int | None, **more: float) -> RequestSampling:
    return request_sampling(
        SamplingParams(repeat_last_n=window, **{"frequency_penalty": 1.0, **more}), vocab_size=V, seed=1
    )


@partial(jax.jit, static_argnums=4)
def counted(state: SamplerState, words: jax.Array, position: jax.Array, tokens: jax.Array, slots: int) -> SamplerState:
    slot = jnp.arange(slots)
    batch = SamplingBatch.from_words(words, slot=slot, samples=slot < slots - 1, position=position)
    return count(state, batch, tokens)


@settings(deadline=None)
@given(window=st.integers(1, W), prompt=TOKENS, before=TOKENS, after=TOKENS)
def test_the_state_is_of_the_last_tokens(window: int, prompt: list[int], before: list[int], after: list[int]) -> None:
    """A slot that is set up after some tokens, of a request that was preempted for example, and goes on from there."""
    prompt = [0, *prompt]
    sampling, free = resolved(window), resolved(None)
    text, older = [*prompt, *before], max(0, len(prompt) + len(before) - window)
    state = make_sampler_state(num_slots=S, vocab_size=V, max_bans=1, max_window=W, max_scored=1)
    seen, counts = np.zeros((S, V), bool), np.zeros((S, V), np.uint16)
    seen[0, prompt[older:]] = True
    np.add.at(counts[0], before[max(0, older - len(prompt)) :], 1)
    recent = np.zeros((S, W + 1), np.int32)
    recent[0] = recent_tokens(prompt, before, size=W + 1)
    state = SamplerState(
        prompt_seen=jnp.asarray(seen),
        output_count=jnp.asarray(counts),
        logit_bias=state.logit_bias,
        ban_previous=state.ban_previous,
        ban_token=state.ban_token,
        recent=jnp.asarray(recent),
        scored=state.scored,
    )
    words = np.stack([sampling.words, free.words, sampling.words])
    for token in after:
        state = counted(state, words, np.full(S, len(text), np.int32), np.full(S, token, np.int32), S)
        text.append(token)
    start = max(0, len(text) - window)
    own = [token for place, token in enumerate(text) if place >= max(start, len(prompt))]
    assert np.array_equal(state.output_count[0], np.bincount(own, minlength=V))
    assert set(np.flatnonzero(state.prompt_seen[0]).tolist()) == set(text[start : len(prompt)])
    assert np.array_equal(state.output_count[1], np.bincount(after, minlength=V))  # of a row without a window: all
    assert not np.asarray(state.output_count[2]).any() and not np.asarray(state.recent[2]).any()  # it did not sample


def test_a_slot_is_set_up_with_the_last_tokens() -> None:
    state, slots = make_sampler_state(num_slots=S, vocab_size=V), SlotEdits(V)
    for edit in slots.begin(1, resolved(4), prompt=[1, 2, 3, 3], output=[5, 6]):
        state = EDITS[edit.name].function(state, *edit.arguments)
    assert np.flatnonzero(state.prompt_seen[1]).tolist() == [3]
    assert np.flatnonzero(state.output_count[1]).tolist() == [5, 6]
    assert state.recent[1, :7].tolist() == [-2, -3, -4, -4, 6, 7, 0]
    for edit in slots.begin(1, resolved(1), prompt=[1, 2], output=[5, 6]):
        state = EDITS[edit.name].function(state, *edit.arguments)
    assert not np.asarray(state.prompt_seen[1]).any() and np.flatnonzero(state.output_count[1]).tolist() == [6]
    assert recent_tokens([1] * 10, [2, 3], size=4).tolist() == [-2, -2, 3, 4]


def test_windows_of_requests() -> None:
    assert resolved(5).window == 5 and resolved(5).features & Feature.WINDOW
    assert resolved(-1).window == resolved(None).window == 0 and not resolved(-1).features & Feature.WINDOW
    assert not resolved(0).features & (Feature.PENALTY | Feature.WINDOW)  # they look at nothing
    assert not resolved(5, frequency_penalty=0.0).features & (Feature.PENALTY | Feature.WINDOW)
    for wrong in (-2, MAX_WINDOW + 1, 1.5, True):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(repeat_last_n=wrong)  # type: ignore[arg-type]
        assert caught.value.field == "repeat_last_n"
