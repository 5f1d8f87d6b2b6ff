"""Heads: the functions that make tokens or log-probabilities of the hidden states of a forward pass.

A dispatch chains ``forward`` and its heads. Where the host has something to do between them, they are two dispatches,
with the rows' ends as the first one's result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from llmjax.engine.device.batch import StepBatch
from llmjax.engine.device.device_state import NO_TOKEN, NOT_FINITE, DeviceState, Ends
from llmjax.engine.device.rows import ENDED
from llmjax.kernels.attention.types import up_to_last
from llmjax.kernels.finite import finite_rows
from llmjax.kernels.sharding import all_sum, parts
from llmjax.sampling import sampler
from llmjax.sampling.logprobs import LogprobArrays, no_logprobs, token_logprobs
from llmjax.sampling.sampler import SampleOutput, SamplingBatch
from llmjax.sampling.whole_rows import on_whole_rows

if TYPE_CHECKING:
    from llmjax.models import CausalLM

# Of some rows: hidden states, last tokens, what is asked for, the tokens that may be sampled.
_Own = tuple[jax.Array, jax.Array, SamplingBatch, jax.Array | None]

LOGPROB_BLOCK = 64  # prompt positions whose logits exist at once
LOGPROB_BYTES = 32 << 20  # most bytes that these take; glibc maps twice as much anew at every step


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The next token of each row, or the next ones ([K, R])."""

    tokens: jax.Array  # i32 [R]; NO_TOKEN where the row does not sample, NOT_FINITE where it cannot
    logprobs: LogprobArrays  # [R]; zeros unless a row asks


def ends(hidden: jax.Array, batch: StepBatch) -> Ends:
    """Where the rows end.

    Args:
        hidden: [T, D], from ``forward``.
        batch: the batch that ``forward`` was given.
    """
    return Ends(
        hidden=hidden if batch.decode else hidden[batch.last],
        last_token=batch.last_tokens,
        kv_len=batch.kv_len,
        slot=batch.slot,
        steps=batch.steps,
    )


def few_rows(rows: int) -> int:
    """Most rows of a mixed step that may sample for `sample` to compute only their logits, not those of all rows."""
    return min(-(-rows // 8), rows - 1)


def sample(
    model: CausalLM,
    state: DeviceState,
    ends: Ends,
    *,
    max_logprobs: int,
    mask: jax.Array | None = None,
    waits: jax.Array | None = None,
    few: int = 0,
) -> tuple[DeviceState, Sampled]:
    """Samples a token after each row's last one, and stores it and the computed lengths in the slots' state.

    Rows in the middle of a prompt sample too (one shape for all), but these tokens are dropped. If no more than ``few``
    rows sample, only their logits are computed: most rows of a step that computes a prompt are padding.

    Args:
        model: the model, with its weights.
        state: the state that ``forward`` returned.
        ends: where the rows end.
        max_logprobs: top alternatives that are reported.
        mask: i32 [R, ceil(V / 32)], the tokens that a row may sample, as bits; None: all.
        waits: bool [], nothing is sampled or noted yet, because another dispatch does it; None: never.
        few: a number of rows, fewer than there are; 0: logits of all rows are computed, or none.
    """
    rows, slot = state.rows, ends.slot
    goes_on = ends.last_token != ENDED
    if waits is not None:
        goes_on &= ~waits
    samples = (ends.steps > 0) & goes_on
    asked = SamplingBatch.from_words(rows.word("sampling", slot), slot=slot, samples=samples, position=ends.kv_len)

    everyone = (ends.hidden, ends.last_token, asked, mask)

    def found(own: _Own) -> tuple[SampleOutput, jax.Array]:
        hidden, last_token, asked, mask = own
        logits = model.logits(hidden, up_to_last(asked.samples), rows.word("adapter", asked.slot))
        chosen = sampler.choose(
            logits, state.sampler, asked, last_token=last_token, max_logprobs=max_logprobs, mask=mask
        )
        return chosen, _finite(logits)

    def nothing(own: _Own) -> tuple[SampleOutput, jax.Array]:
        tokens = jnp.zeros_like(slot)
        blank = no_logprobs(len(slot), max_logprobs=max_logprobs, max_scored=state.sampler.max_scored)
        return SampleOutput(tokens, blank), tokens == 0

    # Where the host is waited for, or all rows are in the middle of their prompts, there is no product with the
    # vocabulary.
    if few:
        chosen, finite = _found_of_few(found, nothing, everyone, samples, few=few)
    elif waits is not None:
        chosen, finite = jax.lax.cond(waits, nothing, found, everyone)
    else:
        chosen, finite = found(everyone)
    slots = sampler.count(state.sampler, asked, chosen.tokens)
    tokens = jnp.where(finite, chosen.tokens, NOT_FINITE)
    stopped = jnp.any(tokens[:, None] == rows.word("stops", slot), axis=1) & (ends.kv_len >= rows.word("min_len", slot))
    nobody = rows.length.shape[0]
    taken_in = jnp.where((ends.kv_len > 0) & goes_on, slot, nobody)
    sampled = jnp.where(samples, slot, nobody)
    new_rows = replace(
        rows,
        length=rows.length.at[taken_in].set(ends.kv_len, mode="drop"),
        last_token=rows.last_token.at[sampled].set(jnp.where(~finite | stopped, ENDED, tokens), mode="drop"),
    )
    new_state = replace(state, rows=new_rows, sampler=slots)
    return new_state, Sampled(jnp.where(samples, tokens, NO_TOKEN), chosen.logprobs)


def _found_of_few(
    found: Callable[[_Own], tuple[SampleOutput, jax.Array]],
    nothing: Callable[[_Own], tuple[SampleOutput, jax.Array]],
    everyone: _Own,
    samples: jax.Array,
    *,
    few: int,
) -> tuple[SampleOutput, jax.Array]:
    """What is ``found`` of the rows that sample (bool [R]): of all rows only if more than a few do."""
    count = jnp.cumsum(samples, dtype=jnp.int32)  # up to each row

    def found_of_few(everyone: _Own) -> tuple[SampleOutput, jax.Array]:
        row = jnp.searchsorted(count, jnp.arange(1, few + 1), method="compare_all")
        row = jnp.minimum(row, len(samples) - 1)  # there may be fewer
        own = found(jax.tree.map(lambda x: x[row], everyone))
        return jax.tree.map(lambda x: x[jnp.clip(count - 1, 0, few - 1)], own)

    total = count[-1]
    which = (total > 0).astype(jnp.int32) + (total > few)
    return jax.lax.switch(which, (nothing, found_of_few, found), everyone)


def verify(
    model: CausalLM, state: DeviceState, hidden: jax.Array, batch: StepBatch, *, drafts: int, max_logprobs: int
) -> tuple[DeviceState, Sampled]:
    """Samples after every token of each row, as if each draft were right, and keeps the tokens up to the first one that
    differs from its draft.

    This is speculative sampling (Leviathan et al. 2023) with deterministic proposals: the token is the draft with
    probability p(draft), else one of the others, each in proportion to its p. Because noise depends only on seed,
    position and token, it is also the token that a step without drafts would have sampled.

    Args:
        model: the model, with its weights.
        state: the state that ``forward`` returned.
        hidden: [T, D], from ``forward``.
        batch: the batch that ``forward`` was given, in the drafted family: each row's first token is known, the others
            are drafts.
        drafts: most drafts of a row, K - 1.
        max_logprobs: top alternatives that are reported.

    Returns:
        The state after the tokens that were kept, and these tokens: [K, R], NO_TOKEN after the last one.
    """
    rows, fed, row = state.rows, batch.tokens, batch.row
    first, count = batch.query_start[:-1], jnp.diff(batch.query_start)
    place = jnp.arange(fed.shape[0], dtype=jnp.int32) - first[row]  # in the row; past its end for padding
    alive = (batch.steps > 0) & (fed[first] != ENDED)
    position = batch.kv_len[row] - count[row] + 1 + place  # position of the sampled token
    slot = batch.slot[row]
    asked = SamplingBatch.from_words(
        rows.word("sampling", slot), slot=slot, samples=alive[row] & (place < count[row]), position=position
    )
    after = jnp.arange(1, 1 + drafts)  # places of drafts
    here = jnp.minimum(first[row][:, None] + after, fed.shape[0] - 1)
    uncounted = jnp.where(after <= place[:, None], fed[here], state.sampler.vocab_size)
    logits = model.logits(hidden, up_to_last(asked.samples), rows.word("adapter", slot))
    chosen = sampler.choose(
        logits, state.sampler, asked, last_token=fed, max_logprobs=max_logprobs, uncounted=uncounted
    )
    tokens = jnp.where(_finite(logits), chosen.tokens, NOT_FINITE)
    stopped = jnp.any(tokens[:, None] == rows.word("stops", slot), axis=1) & (position >= rows.word("min_len", slot))
    ended = stopped | (tokens == NOT_FINITE)

    # By row and place from here on, [R, K].
    at = jnp.minimum(first[:, None] + jnp.arange(1 + drafts), fed.shape[0] - 1)
    kept, right = alive.astype(jnp.int32), alive
    for i in range(drafts):  # all places at once are compiled wrong by jaxlib 0.12 for AVX2
        right &= (tokens[at[:, i]] == fed[at[:, i + 1]]) & ~ended[at[:, i]] & (i + 1 < count)
        kept += right
    found = jnp.where(jnp.arange(1 + drafts) < kept[:, None], tokens[at], NO_TOKEN)
    slots = state.sampler
    for i in range(1 + drafts):
        own = jax.tree.map(lambda x, i=i: x[at[:, i]], asked)
        slots = sampler.count(slots, replace(own, samples=found[:, i] >= 0), jnp.maximum(found[:, i], 0))
    last = at[jnp.arange(kept.shape[0]), jnp.maximum(kept - 1, 0)]
    owner = jnp.where(alive, batch.slot, rows.length.shape[0])
    new_rows = replace(
        rows,
        length=rows.length.at[owner].set(batch.kv_len - count + kept, mode="drop"),
        last_token=rows.last_token.at[owner].set(jnp.where(ended[last], ENDED, tokens[last]), mode="drop"),
    )
    logprobs = jax.tree.map(lambda x: jnp.swapaxes(x[at], 0, 1), chosen.logprobs)
    return replace(state, rows=new_rows, sampler=slots), Sampled(found.T, logprobs)


def _finite(logits: jax.Array) -> jax.Array:
    """Which rows have no NaN or infinity among their logits, bool [R]."""
    own = finite_rows(logits.astype(jnp.float32))
    if parts("vocab") == 1:
        return own
    return all_sum((~own).astype(jnp.int32), "vocab") == 0


def score(
    model: CausalLM,
    state: DeviceState,
    hidden: jax.Array,
    batch: StepBatch,
    *,
    vocab_size: int,
    max_logprobs: int,
) -> LogprobArrays:
    """Log-probabilities of the prompt token after each position, a block of logits at a time.

    Args:
        model: the model, with its weights.
        state: the state that ``forward`` returned.
        hidden: [T, D], from ``forward``.
        batch: the batch that ``forward`` was given, in the mixed family.
        vocab_size: size of the whole model's vocabulary.
        max_logprobs: top alternatives that are reported.

    Returns:
        The log-probabilities of ``batch.targets``; zeros unless a row asks for them.
    """
    targets = batch.targets
    assert targets is not None  # the mixed family has them
    tokens = targets.shape[0]
    block = max(1, min(LOGPROB_BLOCK, tokens, LOGPROB_BYTES // (4 * vocab_size)))

    scored = partial(token_logprobs, max_logprobs=max_logprobs)
    places = state.rows.word("adapter", batch.slot[batch.row])

    def all_blocks(found: LogprobArrays) -> LogprobArrays:
        def put(i: jax.Array, found: LogprobArrays) -> LogprobArrays:
            # A gather, and no slice: XLA does not take a slice by a loop's counter into a CUDA graph.
            at = i * block + jnp.arange(block)
            rows = jnp.minimum(at, tokens - 1)
            logits = model.logits(hidden[rows], places=places[rows])
            new = on_whole_rows(scored, logits, targets[rows], vocab_size=vocab_size)
            return jax.tree.map(lambda all, part: all.at[at].set(part, mode="drop"), found, new)

        return jax.lax.fori_loop(0, -(-tokens // block), put, found)

    nothing = no_logprobs(tokens, max_logprobs=max_logprobs)
    return jax.lax.cond(batch.any_prompt_logprobs, all_blocks, lambda found: found, nothing)
