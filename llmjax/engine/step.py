"""The jitted step: one dispatch takes the packed batch, runs the model, samples, the result stays there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import models
from kernels.attention import KVPages
from llmjax.engine.batch import BatchLayout
from llmjax.sampling.logprobs import TokenLogprobs, token_logprobs
from llmjax.sampling.sampler import sample
from llmjax.sampling.state import SamplerState
from models.functional import ModelGraph

LOGPROB_BLOCK = 64  # prompt positions whose logits exist at once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Everything that lives from step to step, donated through it. S slots."""

    kv: tuple[KVPages, ...]  # one per layer
    last_token: jax.Array  # i32 [S]
    sampler: SamplerState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host may read, one step late."""

    tokens: jax.Array  # i32 [R]; meaningful where the row samples
    logprobs: TokenLogprobs  # of the sampled tokens [R]; zeros unless a row asks
    prompt_logprobs: TokenLogprobs | None  # of ``targets`` [T]; zeros unless a row asks; None in the decode family


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
    """Runs one step.

    Args:
        weights: in the order of ``names``; a tuple, because sorting a dict's keys at every dispatch costs time.
        state: donated.
        packed: i32 [layout.size], from ``BatchLayout.pack``.
        graph: the model's graph definition (static).
        names: Hugging Face names of the weights (static).
        layout: shapes of this bucket (static).
        max_logprobs: top alternatives that are reported (static).
    """
    model = models.merge(graph, dict(zip(names, weights, strict=True)))
    batch = layout.unpack(packed)
    row, position, ragged = layout.ragged(batch, page_size=state.kv[0].page_size)
    tokens = jnp.where(batch.tokens < 0, state.last_token[batch.slot[row]], batch.tokens)
    result = model(tokens, position, state.kv, ragged)
    last = jnp.maximum(batch.query_start[1:] - 1, 0)  # [R]
    sampled, sampler = sample(
        model.logits(result.hidden[last]),
        state.sampler,
        batch.sampling,
        last_token=tokens[last],  # not the slot's: after a prefill that is some earlier request's
        max_logprobs=max_logprobs,
    )
    # Rows in the middle of a prompt sample too (one shape for all), but nothing of it is kept.
    kept = jnp.where(batch.sampling.samples, batch.slot, state.last_token.shape[0])
    last_token = state.last_token.at[kept].set(sampled.tokens, mode="drop")
    prompt = None
    if batch.targets is not None:
        prompt = _prompt_logprobs(model, result.hidden, batch.targets, batch.any_prompt_logprobs, max_logprobs)
    new_state = DeviceState(kv=result.kv, last_token=last_token, sampler=sampler)
    return new_state, StepOutput(tokens=sampled.tokens, logprobs=sampled.logprobs, prompt_logprobs=prompt)


def _prompt_logprobs(
    model: Any, hidden: jax.Array, targets: jax.Array, wanted: jax.Array, max_logprobs: int
) -> TokenLogprobs:
    """Log-probabilities of every position's target, a block of logits at a time."""
    tokens = targets.shape[0]
    block = min(LOGPROB_BLOCK, tokens)
    padding = -tokens % block
    blocks = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1]),
        jnp.pad(targets, (0, padding)).reshape(-1, block),
    )

    def score(_: None) -> TokenLogprobs:
        scored = jax.lax.map(lambda b: token_logprobs(model.logits(b[0]), b[1], max_logprobs=max_logprobs), blocks)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], scored)

    shapes = jax.eval_shape(score, None)
    return jax.lax.cond(wanted, score, lambda _: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), None)
