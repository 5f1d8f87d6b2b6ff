"""The head of models that make vectors: pooled hidden states instead of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from llmjax.engine.device.batch import StepBatch
from llmjax.engine.device.device_state import NO_TOKEN, NOT_FINITE, POOLED, DeviceState
from llmjax.models.layers.pooling import PoolingKind

if TYPE_CHECKING:
    from llmjax.models import CausalLM


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pooled:
    """What a step has made of its rows."""

    state: (
        jax.Array
    )  # i32 [R]: POOLED where a text has ended, NOT_FINITE where its vector cannot be used, else NO_TOKEN
    vectors: jax.Array  # f32 [R, size], of texts that have ended
    token_vectors: jax.Array  # f32 [T, size], of each token; zeros unless a row asks


def pool(
    model: CausalLM, state: DeviceState, hidden: jax.Array, batch: StepBatch, *, position: jax.Array
) -> tuple[DeviceState, Pooled]:
    """Makes the vectors of the texts that end in this step, and stores the computed lengths.

    For a text that is cut into chunks, the state keeps the sum for a mean, or the first token's hidden state.

    Args:
        model: the model, with its weights.
        state: the state that ``forward`` returned.
        hidden: [T, D], from ``forward``.
        batch: the batch that ``forward`` was given, in the mixed family; its ``steps`` say which rows end.
        position: i32 [T], positions of the tokens in their texts.
    """
    pooler = model.config.pooler
    assert pooler is not None and state.pooled is not None
    rows = state.rows
    normed = model.model.finish(hidden).astype(jnp.float32)
    if pooler.kind in ("last", "each"):
        raw, sums = normed[batch.last], state.pooled
    else:
        raw, sums = _summed(normed, state.pooled, batch, kind=pooler.kind, position=position)
    places = rows.word("adapter", batch.slot)
    vectors = model.headed(raw, places)
    if pooler.of_pictures and batch.media is not None and state.media is not None:
        at = batch.media.places[batch.last]
        own = state.media.rows[0, jnp.maximum(at, 0)].astype(jnp.float32)
        vectors = jnp.where((at >= 0)[:, None], own, vectors)
    # The matrices after pooling are a text's, unless each token has a vector or a label.
    by_token = pooler.kind == "each" or pooler.task == "classify"
    of_tokens = partial(model.headed, places=places[batch.row]) if by_token else (lambda x: x)
    shape = jax.eval_shape(of_tokens, normed)
    token_vectors = jax.lax.cond(
        batch.any_prompt_logprobs, of_tokens, lambda x: jnp.zeros(shape.shape, shape.dtype), normed
    )
    done = batch.steps > 0
    finite = jnp.all(jnp.isfinite(vectors), axis=1)
    nobody = rows.length.shape[0]
    taken_in = jnp.where(batch.kv_len > 0, batch.slot, nobody)
    new_rows = replace(rows, length=rows.length.at[taken_in].set(batch.kv_len, mode="drop"))
    found = jnp.where(done, jnp.where(finite, POOLED, NOT_FINITE), NO_TOKEN)
    return replace(state, rows=new_rows, pooled=sums), Pooled(found, vectors, token_vectors)


def _summed(
    normed: jax.Array, before: jax.Array, batch: StepBatch, *, kind: PoolingKind, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What is pooled of each row up to its last token [R, D], and the sums [slots, D] to keep."""
    count = jnp.diff(batch.query_start)
    counts = jnp.arange(len(normed)) < batch.query_start[-1]
    if kind == "cls":
        counts &= position == 0
    # A product, because a scatter takes far longer on XLA's CPU. Zero times infinity is not a number: infinities of one
    # row must not get into the others.
    mine = (batch.row == jnp.arange(len(count))[:, None]) & counts
    finite = jnp.all(jnp.isfinite(normed), axis=1)
    found = jnp.dot(mine.astype(jnp.float32), jnp.where(finite[:, None], normed, 0), precision="highest")
    spoilt = jnp.any(mine & ~finite, axis=1)
    begins = batch.kv_len == count
    total = jnp.where(begins[:, None], 0, before[batch.slot]) + jnp.where(spoilt[:, None], jnp.nan, found)
    kept = before.at[jnp.where(count > 0, batch.slot, len(before))].set(total, mode="drop")
    return (total / jnp.maximum(batch.kv_len, 1)[:, None] if kind == "mean" else total), kept
