"""The jitted step: one dispatch takes the packed batch, runs the model, samples, the result stays there.

A decode dispatch may take several steps in a loop: each row's sampled token is its next input, and a row leaves when it
has its tokens or samples a stop id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from llmjax import models
from llmjax.engine.batch import READ_DEVICE, BatchLayout, StepBatch
from llmjax.models.functional import ModelGraph
from llmjax.models.layers.state import LayerState
from llmjax.sampling.logprobs import LogprobArrays, no_logprobs, token_logprobs
from llmjax.sampling.sampler import sample
from llmjax.sampling.state import SamplerState

LOGPROB_BLOCK = 64  # prompt positions whose logits exist at once
ENDED = -1  # in ``last_token``: the slot's sequence has ended; what is already planned for it computes nothing
NO_TOKEN = -1  # in ``StepOutput.tokens``: nothing was sampled
NOT_FINITE = -2  # in ``StepOutput.tokens``: nothing could be sampled, for there were NaN or infinities among the logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Everything that lives from step to step, donated through it. S slots."""

    kv: tuple[LayerState, ...]  # one per layer
    last_token: jax.Array  # i32 [S], or ENDED
    sampler: SamplerState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host may read, one dispatch late. K is ``Bucket.steps``."""

    tokens: jax.Array  # i32 [K, R]; NO_TOKEN where the row did not sample, NOT_FINITE where it could not
    logprobs: LogprobArrays  # of the sampled tokens [K, R]; zeros unless a row asks
    prompt_logprobs: LogprobArrays | None  # of ``targets`` [T]; zeros unless a row asks; None in the decode family


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Loop:
    """What a decode dispatch carries from step to step."""

    done: jax.Array  # i32 []: steps taken
    state: DeviceState
    tokens: jax.Array  # as in StepOutput
    logprobs: LogprobArrays


def step(
    weights: tuple[jax.Array, ...],
    state: DeviceState,
    packed: jax.Array,
    *,
    graph: ModelGraph,
    names: tuple[str, ...],
    layout: BatchLayout,
    max_logprobs: int,
) -> tuple[DeviceState, StepOutput]:
    """Runs one dispatch.

    Args:
        weights: in the order of ``names``; a tuple, because sorting a dict's keys at every dispatch costs time.
        state: donated.
        packed: i32 [layout.size], from ``BatchLayout.pack``.
        graph: the model's graph definition (static).
        names: Hugging Face names of the weights (static).
        layout: shapes of this bucket (static).
        max_logprobs: top alternatives that are reported (static).
    """
    batch = layout.unpack(packed)

    def merged(arrays: tuple[jax.Array, ...]) -> Any:
        return models.merge(graph, dict(zip(names, arrays, strict=True)))

    if not layout.bucket.decode:
        return _mixed(merged(weights), state, batch, layout=layout, max_logprobs=max_logprobs)

    def once(loop: _Loop) -> _Loop:
        # The barrier ties the weights to the iteration. Else XLA takes what depends on them alone out of the loop: it
        # would convert the whole embedding to f32 at every dispatch.
        done, arrays = jax.lax.optimization_barrier((loop.done, weights))
        loop = replace(loop, done=done)
        return _decode(merged(arrays), loop, batch, layout=layout, max_logprobs=max_logprobs)

    steps, rows = layout.bucket.steps, layout.bucket.rows
    nothing = no_logprobs(steps * rows, max_logprobs=max_logprobs)
    loop = _Loop(
        done=jnp.int32(0),
        state=state,
        tokens=jnp.full((steps, rows), NO_TOKEN, jnp.int32),
        logprobs=jax.tree.map(lambda x: x.reshape(steps, rows, *x.shape[1:]), nothing),
    )
    if steps == 1:
        loop = once(loop)  # no condition to wait for
    else:
        loop = jax.lax.while_loop(
            lambda loop: (loop.done < steps) & jnp.any(_alive(batch, _inputs(batch, loop), loop.done)), once, loop
        )
    return loop.state, StepOutput(tokens=loop.tokens, logprobs=loop.logprobs, prompt_logprobs=None)


def _mixed(
    model: Any, state: DeviceState, batch: StepBatch, *, layout: BatchLayout, max_logprobs: int
) -> tuple[DeviceState, StepOutput]:
    """Chunks of prompts, and one token of each other row."""
    row, position, ragged = layout.ragged(batch, page_size=state.kv[0].page_size)
    tokens = jnp.where(batch.tokens == READ_DEVICE, state.last_token[batch.slot[row]], batch.tokens)
    result = model(tokens, position, state.kv, ragged, prompt_len=batch.prompt_len[row])
    last = jnp.maximum(batch.query_start[1:] - 1, 0)  # [R]
    # Rows in the middle of a prompt sample too (one shape for all), but nothing of it is kept.
    samples = (batch.steps > 0) & (tokens[last] != ENDED)
    new_state, sampled, logprobs = _sample(
        model,
        replace(state, kv=result.kv),
        result.hidden[last],
        _narrowed(batch, batch.kv_len, samples),
        last_token=tokens[last],  # not the slot's: after a prefill that is some earlier request's
        max_logprobs=max_logprobs,
    )
    return new_state, StepOutput(
        tokens=sampled[None],
        logprobs=jax.tree.map(lambda x: x[None], logprobs),
        prompt_logprobs=_prompt_logprobs(model, result.hidden, batch, max_logprobs),
    )


def _decode(model: Any, loop: _Loop, batch: StepBatch, *, layout: BatchLayout, max_logprobs: int) -> _Loop:
    """One token of each row that is alive; the others are padding."""
    tokens = _inputs(batch, loop)
    alive = _alive(batch, tokens, loop.done)
    now = _narrowed(batch, jnp.where(alive, batch.kv_len + loop.done, 0), alive & (batch.steps > 0))
    _, position, ragged = layout.ragged(now, page_size=loop.state.kv[0].page_size)
    result = model(tokens, position, loop.state.kv, ragged, prompt_len=batch.prompt_len)
    state, sampled, logprobs = _sample(
        model,
        replace(loop.state, kv=result.kv),
        result.hidden,
        now,
        last_token=tokens,
        max_logprobs=max_logprobs,
    )
    return _Loop(
        done=loop.done + 1,
        state=state,
        tokens=loop.tokens.at[loop.done].set(sampled),
        logprobs=jax.tree.map(lambda all, new: all.at[loop.done].set(new), loop.logprobs, logprobs),
    )


def _inputs(batch: StepBatch, loop: _Loop) -> jax.Array:
    """i32 [R]: the rows' next input tokens, ENDED where there is none."""
    from_host = (loop.done == 0) & (batch.tokens != READ_DEVICE)
    return jnp.where(from_host, batch.tokens, loop.state.last_token[batch.slot])


def _alive(batch: StepBatch, tokens: jax.Array, done: jax.Array) -> jax.Array:
    """bool [R]: rows with something to compute after ``done`` steps."""
    return (batch.kv_len > 0) & (tokens != ENDED) & (done < jnp.maximum(batch.steps, 1))


def _narrowed(batch: StepBatch, kv_len: jax.Array, samples: jax.Array) -> StepBatch:
    """The batch with other lengths (i32 [R]), in which only some rows sample (bool [R])."""
    return replace(batch, kv_len=kv_len, sampling=replace(batch.sampling, samples=samples, position=kv_len))


def _sample(
    model: Any,
    state: DeviceState,
    hidden: jax.Array,
    batch: StepBatch,
    *,
    last_token: jax.Array,
    max_logprobs: int,
) -> tuple[DeviceState, jax.Array, LogprobArrays]:
    """Samples from ``hidden`` ([R, D]) and notes the tokens as the slots' last ones.

    Returns:
        The state, the tokens (i32 [R], as in `StepOutput`) and their log-probabilities.
    """
    logits = model.logits(hidden)
    sampled, sampler = sample(logits, state.sampler, batch.sampling, last_token=last_token, max_logprobs=max_logprobs)
    samples, finite = batch.sampling.samples, jnp.all(jnp.isfinite(logits), axis=1)
    tokens = jnp.where(finite, sampled.tokens, NOT_FINITE)
    ended = ~finite | jnp.any(tokens[:, None] == batch.stops, axis=1)
    kept = jnp.where(samples, batch.slot, state.last_token.shape[0])
    last = state.last_token.at[kept].set(jnp.where(ended, ENDED, tokens), mode="drop")
    new_state = replace(state, last_token=last, sampler=sampler)
    return new_state, jnp.where(samples, tokens, NO_TOKEN), sampled.logprobs


def _prompt_logprobs(model: Any, hidden: jax.Array, batch: StepBatch, max_logprobs: int) -> LogprobArrays:
    """Log-probabilities of every position's target, a block of logits at a time."""
    targets = batch.targets
    assert targets is not None  # the mixed family has them
    tokens = targets.shape[0]
    block = min(LOGPROB_BLOCK, tokens)

    def score(found: LogprobArrays) -> LogprobArrays:
        def put(i: jax.Array, found: LogprobArrays) -> LogprobArrays:
            # A gather, and no slice: XLA does not take a slice by a loop's counter into a CUDA graph.
            at = i * block + jnp.arange(block)
            rows = jnp.minimum(at, tokens - 1)
            new = token_logprobs(model.logits(hidden[rows]), targets[rows], max_logprobs=max_logprobs)
            return jax.tree.map(lambda all, part: all.at[at].set(part, mode="drop"), found, new)

        return jax.lax.fori_loop(0, -(-tokens // block), put, found)

    nothing = no_logprobs(tokens, max_logprobs=max_logprobs)
    return jax.lax.cond(batch.any_prompt_logprobs, score, lambda found: found, nothing)
