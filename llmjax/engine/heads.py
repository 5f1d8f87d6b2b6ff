"""Heads: what is made of the hidden states that a forward pass leaves.

Each is a function of its own. A dispatch chains ``forward`` and its heads; where the host has something to do between
them, they are two dispatches, with the rows' ends as the first one's result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from llmjax.engine.batch import StepBatch
from llmjax.engine.device_state import NO_TOKEN, NOT_FINITE, DeviceState, Ends
from llmjax.engine.rows import ENDED
from llmjax.kernels.sharding import all_sum, parts
from llmjax.models import CausalLM
from llmjax.sampling import sampler
from llmjax.sampling.logprobs import LogprobArrays, no_logprobs, token_logprobs
from llmjax.sampling.sampler import SampleOutput, SamplingBatch
from llmjax.sampling.whole_rows import on_whole_rows

LOGPROB_BLOCK = 64  # prompt positions whose logits exist at once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The next token of each row."""

    tokens: jax.Array  # i32 [R]; NO_TOKEN where the row does not sample, NOT_FINITE where it cannot
    logprobs: LogprobArrays  # [R]; zeros unless a row asks


def ends(hidden: jax.Array, batch: StepBatch) -> Ends:
    """Where the rows end.

    Args:
        hidden: [T, D], from ``forward``.
        batch: of that ``forward``.
    """
    return Ends(
        hidden=hidden if batch.decode else hidden[batch.last],
        last_token=batch.last_tokens,
        kv_len=batch.kv_len,
        slot=batch.slot,
        steps=batch.steps,
    )


def sample(
    model: CausalLM,
    state: DeviceState,
    ends: Ends,
    *,
    max_logprobs: int,
    mask: jax.Array | None = None,
    waits: jax.Array | None = None,
) -> tuple[DeviceState, Sampled]:
    """Samples a token behind each row's last one, and notes it and how far the layers have got as the slots'.

    Rows in the middle of a prompt sample too (one shape for all), but nothing of it is kept.

    Args:
        model: with its weights.
        state: as ``forward`` has left it.
        ends: of the rows.
        max_logprobs: top alternatives that are reported.
        mask: i32 [R, ceil(V / 32)], the tokens that a row may sample, as bits; None: all.
        waits: bool [], nothing is sampled or noted yet, for another dispatch does it; None: never.
    """
    rows, slot = state.rows, ends.slot
    goes_on = ends.last_token != ENDED
    if waits is not None:
        goes_on &= ~waits
    samples = (ends.steps > 0) & goes_on
    asked = SamplingBatch.from_words(rows.word("sampling", slot), slot=slot, samples=samples, position=ends.kv_len)

    def found() -> tuple[SampleOutput, jax.Array]:
        logits = model.logits(ends.hidden)
        chosen = sampler.choose(
            logits, state.sampler, asked, last_token=ends.last_token, max_logprobs=max_logprobs, mask=mask
        )
        return chosen, _finite(logits)

    def nothing() -> tuple[SampleOutput, jax.Array]:
        tokens = jnp.zeros_like(slot)
        return SampleOutput(tokens, no_logprobs(len(slot), max_logprobs=max_logprobs)), tokens == 0

    # What the host is waited for costs no product with the vocabulary before it.
    chosen, finite = found() if waits is None else jax.lax.cond(waits, nothing, found)
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


def _finite(logits: jax.Array) -> jax.Array:
    """Which rows have no NaN or infinity among their logits, bool [R]."""
    finite = jnp.all(jnp.isfinite(logits), axis=1)
    if parts("vocab") == 1:
        return finite
    return all_sum((~finite).astype(jnp.int32), "vocab") == 0


def score(model: CausalLM, hidden: jax.Array, batch: StepBatch, *, vocab_size: int, max_logprobs: int) -> LogprobArrays:
    """Log-probabilities of the prompt token behind each position, a block of logits at a time.

    Args:
        model: with its weights.
        hidden: [T, D], from ``forward``.
        batch: of that ``forward``, in the mixed family.
        vocab_size: of the whole model.
        max_logprobs: top alternatives that are reported.

    Returns:
        Of ``batch.targets``; zeros unless a row asks.
    """
    targets = batch.targets
    assert targets is not None  # the mixed family has them
    tokens = targets.shape[0]
    block = min(LOGPROB_BLOCK, tokens)

    scored = partial(token_logprobs, max_logprobs=max_logprobs)

    def all_blocks(found: LogprobArrays) -> LogprobArrays:
        def put(i: jax.Array, found: LogprobArrays) -> LogprobArrays:
            # A gather, and no slice: XLA does not take a slice by a loop's counter into a CUDA graph.
            at = i * block + jnp.arange(block)
            rows = jnp.minimum(at, tokens - 1)
            logits = model.logits(hidden[rows])
            new = on_whole_rows(scored, logits, targets[rows], vocab_size=vocab_size)
            return jax.tree.map(lambda all, part: all.at[at].set(part, mode="drop"), found, new)

        return jax.lax.fori_loop(0, -(-tokens // block), put, found)

    nothing = no_logprobs(tokens, max_logprobs=max_logprobs)
    return jax.lax.cond(batch.any_prompt_logprobs, all_blocks, lambda found: found, nothing)
