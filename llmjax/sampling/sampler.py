"""From logits to tokens, inside the jitted step.

Order: grammar mask -> allowed ids, bad words, min_tokens and logit_bias -> repetition, frequency, presence penalties
-> greedy if the temperature is 0, else temperature -> min-p -> top-k -> top-p -> Gumbel-max. Log-probabilities are of
the raw logits.

Shapes are static and there is one executable: what no row of a step asks for is skipped, by ``lax.cond`` on a scalar
or row by row in C++, and rows that do not ask for it are left exactly as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from llmjax.kernels.argmax import argmax
from llmjax.kernels.cpu import sampling as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.registry import Implementation, Operation
from llmjax.kernels.sharding import parts
from llmjax.sampling.draw import draw
from llmjax.sampling.logprobs import LogprobArrays, no_logprobs, token_logprobs
from llmjax.sampling.noise import row_keys
from llmjax.sampling.settings import SETTINGS, SETTINGS_WORDS, Feature
from llmjax.sampling.state import SamplerState
from llmjax.sampling.whole_rows import argmax_of_parts, on_whole_rows

Uses = Callable[[Feature], jax.Array]  # whether some sampling row of the step has one of these features: bool []
EDITS = Feature.PENALTY | Feature.BIAS | Feature.BAN  # what may change which token is the most likely


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """One row per request of a step. R rows."""

    slot: jax.Array  # i32 [R]
    samples: jax.Array  # bool [R]: False for padding and for prefill chunks that do not end the prompt
    position: jax.Array  # i32 [R]: of the token being sampled; the random counter
    key: jax.Array  # u32 [R, 2]
    temperature: jax.Array  # f32 [R]; 0: greedy
    top_p: jax.Array  # f32 [R]; 1: off
    top_k: jax.Array  # i32 [R]; 0: off
    min_p: jax.Array  # f32 [R]; 0: off
    presence: jax.Array  # f32 [R]; 0: off
    frequency: jax.Array  # f32 [R]; 0: off
    repetition: jax.Array  # f32 [R]; 1: off
    window: jax.Array  # i32 [R], tokens that the penalties look at; 0: all
    features: jax.Array  # i32 [R], bits of Feature

    @classmethod
    def from_words(cls, words: jax.Array, *, slot: jax.Array, samples: jax.Array, position: jax.Array) -> SamplingBatch:
        """Takes the gathered ``RequestSampling.words`` (i32 [R, SETTINGS_WORDS]) apart."""
        if words.shape != (slot.shape[0], SETTINGS_WORDS):
            raise ValueError(f"sampling words have shape {words.shape}, not {(slot.shape[0], SETTINGS_WORDS)}")
        columns = {}
        assert SETTINGS.fields is not None
        for name, (dtype, offset, *_) in SETTINGS.fields.items():
            width = dtype.itemsize // 4
            column = words[:, offset // 4 : offset // 4 + width]
            columns[name] = lax.bitcast_convert_type(column if dtype.shape else column[:, 0], dtype.base)
        return cls(slot=slot, samples=samples, position=position, **columns)

    def has(self, feature: Feature) -> jax.Array:
        """bool [R]: rows with the feature."""
        return (self.features & int(feature)) != 0


# What `choose` knows of its rows: batch, last_token, mask, uncounted.
_Own = tuple[SamplingBatch, jax.Array, jax.Array | None, jax.Array | None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleOutput:
    """R rows. Rows that do not sample hold some valid token."""

    tokens: jax.Array  # i32 [R]
    logprobs: LogprobArrays  # zeros when no row of the step asks


def sample(
    logits: jax.Array, state: SamplerState, batch: SamplingBatch, *, last_token: jax.Array, max_logprobs: int
) -> tuple[SampleOutput, SamplerState]:
    """One token for each row: `choose`, then `count`."""
    choice = choose(logits, state, batch, last_token=last_token, max_logprobs=max_logprobs)
    return choice, count(state, batch, choice.tokens)


def choose(
    logits: jax.Array,
    state: SamplerState,
    batch: SamplingBatch,
    *,
    last_token: jax.Array,
    max_logprobs: int,
    mask: jax.Array | None = None,
    uncounted: jax.Array | None = None,
) -> SampleOutput:
    """One token for each row.

    The tokens of a row depend on its logits, slot, parameters, seed and position alone. A row in which nothing may be
    sampled (every logit -inf, or NaN among the logits) gives token 0.

    Args:
        logits: float [R, V]; where the vocabulary is divided over devices, this device's columns of them.
        state: slots.
        batch: what each row asks for.
        last_token: i32 [R], the token before the one being sampled.
        max_logprobs: static number of top log-probabilities.
        mask: i32 [R, ceil(V / 32)], the tokens that may be sampled, a bit each, the lowest first; None: all.
        uncounted: i32 [R, K], tokens of the output that the slot does not know of yet, V where there are fewer; None:
            there are none.
    """
    logits = logits.astype(jnp.float32)

    def chosen(logits: jax.Array, own: _Own) -> SampleOutput:
        batch, last_token, mask, uncounted = own
        return _choose(
            logits, state, batch, last_token=last_token, max_logprobs=max_logprobs, mask=mask, uncounted=uncounted
        )

    own, vocab_size = (batch, last_token, mask, uncounted), state.vocab_size
    if parts("vocab") == 1:
        return chosen(logits, own)
    if mask is not None:
        return on_whole_rows(chosen, logits, own, vocab_size=vocab_size)
    return lax.cond(
        _uses(batch)(EDITS | Feature.RANDOM | Feature.LOGPROBS),
        lambda: on_whole_rows(chosen, logits, own, vocab_size=vocab_size),
        lambda: SampleOutput(
            argmax_of_parts(logits, vocab_size=vocab_size),
            no_logprobs(logits.shape[0], max_logprobs=max_logprobs, max_scored=state.max_scored),
        ),
    )


def _uses(batch: SamplingBatch) -> Uses:
    features = jnp.bitwise_or.reduce(jnp.where(batch.samples, batch.features, 0))
    return lambda feature: (features & int(feature)) != 0


def _choose(
    logits: jax.Array,
    state: SamplerState,
    batch: SamplingBatch,
    *,
    last_token: jax.Array,
    max_logprobs: int,
    mask: jax.Array | None,
    uncounted: jax.Array | None,
) -> SampleOutput:
    """`choose` of whole rows."""
    uses = _uses(batch)
    tokens: jax.Array = TOKENS(logits, state, batch, last_token, mask, uncounted)
    logprobs = lax.cond(
        uses(Feature.LOGPROBS),
        lambda: token_logprobs(logits, tokens, max_logprobs=max_logprobs, scored=state.scored[batch.slot]),
        lambda: no_logprobs(logits.shape[0], max_logprobs=max_logprobs, max_scored=state.max_scored),
    )
    return SampleOutput(tokens, logprobs)


def tokens_by_scores(
    logits: jax.Array,
    state: SamplerState,
    batch: SamplingBatch,
    last_token: jax.Array,
    mask: jax.Array | None,
    uncounted: jax.Array | None,
) -> jax.Array:
    """The tokens of `choose`, i32 [R], from scores of all of the vocabulary; arguments as there, logits in f32."""
    uses = _uses(batch)
    allowed = logits if mask is None else jnp.where(_bits(mask, logits.shape[1]), logits, -jnp.inf)

    def full() -> jax.Array:
        # One condition for all edits: each one that is not taken copies the logits on an accelerator.
        edited = lax.cond(
            uses(EDITS),
            lambda x: _edit(x, state, batch, last_token=last_token, uncounted=uncounted, uses=uses),
            _same,
            allowed,
        )
        return lax.cond(uses(Feature.RANDOM), lambda: _draw(edited, batch), lambda: argmax(edited))

    tokens: jax.Array = lax.cond(uses(EDITS | Feature.RANDOM), full, lambda: argmax(allowed))
    return tokens


def _tokens_by_rows(
    logits: jax.Array,
    state: SamplerState,
    batch: SamplingBatch,
    last_token: jax.Array,
    mask: jax.Array | None,
    uncounted: jax.Array | None,
) -> jax.Array:
    """The same by the library, row by row, without another array of the logits' size."""
    rows = logits.shape[0]
    keys = lax.cond(
        _uses(batch)(Feature.RANDOM), lambda: row_keys(batch.key, batch.position), lambda: jnp.zeros_like(batch.key)
    )
    nothing = jnp.zeros((rows, 0), jnp.int32)
    edits = cpu.Edits(
        which=jnp.stack([batch.has(feature) for feature in (Feature.BIAS, Feature.BAN, Feature.PENALTY)], axis=1),
        slot=batch.slot,
        last_token=last_token,
        penalties=jnp.stack([batch.repetition, batch.frequency, batch.presence], axis=1),
        mask=nothing if mask is None else mask,
        uncounted=nothing if uncounted is None else uncounted,
        bias=state.logit_bias,
        ban_previous=state.ban_previous,
        ban_token=state.ban_token,
        output_count=state.output_count,
        prompt_seen=state.prompt_seen,
    )
    return cpu.sample(
        logits,
        keys,
        batch.temperature,
        batch.min_p,
        batch.top_k,
        batch.top_p,
        samples=batch.samples,
        edits=edits,
    )


def _native_refuses(*_: object) -> str | None:
    return None if library() is not None else "not built"


# Positional: as `tokens_by_scores`.
TOKENS = Operation(
    "sampling",
    (
        Implementation("C++", _tokens_by_rows, platform="cpu", refuses=_native_refuses),
        Implementation("XLA", tokens_by_scores),
    ),
)


def _bits(mask: jax.Array, count: int) -> jax.Array:
    """The first ``count`` bits of each row, bool [R, count]."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :count] != 0


def _edit(
    x: jax.Array,
    state: SamplerState,
    batch: SamplingBatch,
    *,
    last_token: jax.Array,
    uncounted: jax.Array | None,
    uses: Uses,
) -> jax.Array:
    """Everything that may change which token is the most likely."""

    def bias(x: jax.Array) -> jax.Array:
        value = jnp.where(batch.has(Feature.BIAS)[:, None], state.logit_bias[batch.slot], 0.0)
        return jnp.where(value == -jnp.inf, -jnp.inf, x + value)  # +inf - inf would be NaN

    def ban(x: jax.Array) -> jax.Array:
        holds = (state.ban_previous[batch.slot] == last_token[:, None]) & batch.has(Feature.BAN)[:, None]
        token = jnp.where(holds, state.ban_token[batch.slot], x.shape[-1])
        return x.at[jnp.arange(x.shape[0])[:, None], token].set(-jnp.inf, mode="drop")

    def penalize(x: jax.Array) -> jax.Array:
        count = state.output_count[batch.slot].astype(jnp.float32)
        if uncounted is not None:
            count = count.at[jnp.arange(x.shape[0])[:, None], uncounted].add(1.0, mode="drop")
        sampled = count > 0
        seen = state.prompt_seen[batch.slot] | sampled
        factor = batch.repetition[:, None]
        x = jnp.where(seen, jnp.where(x > 0, x / factor, x * factor), x)
        penalty = batch.frequency[:, None] * count + jnp.where(sampled, batch.presence[:, None], 0.0)
        return jnp.where(batch.has(Feature.PENALTY)[:, None], x - penalty, x)

    for feature, change in ((Feature.BIAS, bias), (Feature.BAN, ban), (Feature.PENALTY, penalize)):
        x = lax.cond(uses(feature), change, _same, x)
    return x


def _same(x: jax.Array) -> jax.Array:
    return x


def _draw(x: jax.Array, batch: SamplingBatch) -> jax.Array:
    keys = row_keys(batch.key, batch.position)
    return draw(x, keys=keys, temperature=batch.temperature, min_p=batch.min_p, top_k=batch.top_k, top_p=batch.top_p)


def count(state: SamplerState, batch: SamplingBatch, tokens: jax.Array) -> SamplerState:
    """Adds the sampled tokens of rows with penalties, and takes those away that leave their windows: R entries of
    donated memory are set."""
    counts = batch.samples & batch.has(Feature.PENALTY)
    old = state.output_count[batch.slot, tokens]
    new = jnp.where(old < jnp.iinfo(jnp.uint16).max, old + 1, old)
    slot = jnp.where(counts, batch.slot, state.num_slots)
    output_count = state.output_count.at[slot, tokens].set(new, mode="drop")
    windowed = counts & batch.has(Feature.WINDOW)
    slot = jnp.where(windowed, batch.slot, state.num_slots)
    recent = state.recent.at[slot, batch.position % state.recent.shape[1]].set(tokens + 1, mode="drop")
    state = replace(state, output_count=output_count, recent=recent)
    output_count, prompt_seen = lax.cond(
        jnp.any(windowed),
        lambda: _without_left(state, batch, windowed),
        lambda: (state.output_count, state.prompt_seen),
    )
    return replace(state, output_count=output_count, prompt_seen=prompt_seen)


def _without_left(state: SamplerState, batch: SamplingBatch, windowed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``output_count`` and ``prompt_seen`` without the tokens that leave windows as one more is sampled.

    Args:
        windowed: bool [R], rows that have a window.
    """
    size = state.recent.shape[1]
    recent, first = state.recent[batch.slot], batch.position - batch.window  # what leaves, if there is such a token
    left = jnp.where(first >= 0, jnp.take_along_axis(recent, (first % size)[:, None], axis=1)[:, 0], 0)
    token = jnp.maximum(jnp.abs(left) - 1, 0)
    sampled = jnp.where(windowed & (left > 0), batch.slot, state.num_slots)
    count = jnp.maximum(state.output_count[batch.slot, token], 1) - 1
    # A token of the prompt may occur once more after the one that leaves.
    age = (batch.position[:, None] - 1 - jnp.arange(size)) % size
    again = jnp.any((recent == left[:, None]) & (age < (batch.window - 1)[:, None]), axis=1)
    prompted = windowed & (left < 0) & ~again

    def forget(row: jax.Array, seen: jax.Array) -> jax.Array:  # a slice: not every device can scatter bytes
        at = batch.slot[row], token[row]
        still = lax.dynamic_slice(seen, at, (1, 1)) & ~prompted[row]
        return lax.dynamic_update_slice(seen, still, at)

    return (
        state.output_count.at[sampled, token].set(count, mode="drop"),
        lax.fori_loop(0, len(token), forget, state.prompt_seen),
    )
