"""Heads: what is made of the hidden states that a forward pass leaves.

Each is a function of its own. A dispatch chains ``forward`` and its heads; where the host has something to do between
them, they are two dispatches, with the hidden states as the first one's result and the same packed batch for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from llmjax.engine.batch import StepBatch
from llmjax.engine.device_state import ENDED, NO_TOKEN, NOT_FINITE, DeviceState
from llmjax.models import CausalLM
from llmjax.sampling import sampler
from llmjax.sampling.logprobs import LogprobArrays, no_logprobs, token_logprobs

LOGPROB_BLOCK = 64  # prompt positions whose logits exist at once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The next token of each row."""

    tokens: jax.Array  # i32 [R]; NO_TOKEN where the row does not sample, NOT_FINITE where it cannot
    logprobs: LogprobArrays  # [R]; zeros unless a row asks


def sample(
    model: CausalLM, state: DeviceState, hidden: jax.Array, batch: StepBatch, *, max_logprobs: int
) -> tuple[DeviceState, Sampled]:
    """Samples a token behind each row's last one and notes it as the slot's.

    Rows in the middle of a prompt sample too (one shape for all), but nothing of it is kept.

    Args:
        model: with its weights.
        state: as ``forward`` has left it.
        hidden: [T, D], from ``forward``.
        batch: of that ``forward``.
        max_logprobs: top alternatives that are reported.
    """
    last_token = batch.last_inputs(state.last_token)
    samples = (batch.steps > 0) & (last_token != ENDED)
    asked = replace(batch.sampling, samples=samples, position=batch.kv_len)
    logits = model.logits(hidden if batch.decode else hidden[batch.last])
    found, slots = sampler.sample(logits, state.sampler, asked, last_token=last_token, max_logprobs=max_logprobs)
    finite = jnp.all(jnp.isfinite(logits), axis=1)
    tokens = jnp.where(finite, found.tokens, NOT_FINITE)
    ended = ~finite | jnp.any(tokens[:, None] == batch.stops, axis=1)
    kept = jnp.where(samples, batch.slot, state.last_token.shape[0])
    last = state.last_token.at[kept].set(jnp.where(ended, ENDED, tokens), mode="drop")
    new_state = replace(state, last_token=last, sampler=slots)
    return new_state, Sampled(jnp.where(samples, tokens, NO_TOKEN), found.logprobs)


def score(model: CausalLM, hidden: jax.Array, batch: StepBatch, *, max_logprobs: int) -> LogprobArrays:
    """Log-probabilities of the prompt token behind each position, a block of logits at a time.

    Args:
        model: with its weights.
        hidden: [T, D], from ``forward``.
        batch: of that ``forward``, in the mixed family.
        max_logprobs: top alternatives that are reported.

    Returns:
        Of ``batch.targets``; zeros unless a row asks.
    """
    targets = batch.targets
    assert targets is not None  # the mixed family has them
    tokens = targets.shape[0]
    block = min(LOGPROB_BLOCK, tokens)

    def all_blocks(found: LogprobArrays) -> LogprobArrays:
        def put(i: jax.Array, found: LogprobArrays) -> LogprobArrays:
            # A gather, and no slice: XLA does not take a slice by a loop's counter into a CUDA graph.
            at = i * block + jnp.arange(block)
            rows = jnp.minimum(at, tokens - 1)
            new = token_logprobs(model.logits(hidden[rows]), targets[rows], max_logprobs=max_logprobs)
            return jax.tree.map(lambda all, part: all.at[at].set(part, mode="drop"), found, new)

        return jax.lax.fori_loop(0, -(-tokens // block), put, found)

    nothing = no_logprobs(tokens, max_logprobs=max_logprobs)
    return jax.lax.cond(batch.any_prompt_logprobs, all_blocks, lambda found: found, nothing)
