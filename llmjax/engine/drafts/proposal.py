"""Drafts from a second, smaller model on the device, in the step that verifies them.

Its layers use the same page numbers as the target model's, and compute the same tokens. So what the host knows of a
sequence's pages (cached prefixes, tokens that are taken back, preemption) holds for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from llmjax.engine.device.batch import StepBatch
from llmjax.engine.device.device_state import DeviceState
from llmjax.engine.device.rows import ENDED
from llmjax.kernels.attention.types import up_to_last
from llmjax.models import ModelGraph
from llmjax.models.config import ModelConfig
from llmjax.models.layers.state import Span
from llmjax.sampling import sampler
from llmjax.sampling.sampler import SamplingBatch

if TYPE_CHECKING:
    from llmjax.models import CausalLM


@dataclass(frozen=True)
class DraftGraph:
    """What a step is compiled from besides the draft model's weights; static.

    Args:
        graph: the draft model's graph definition.
        names: names of its weights, in the order in which they come after the target model's.
        spans: spans of the groups of layers of both models.
    """

    graph: ModelGraph
    names: tuple[str, ...]
    spans: tuple[Span, ...]


def of_groups(batch: StepBatch, spans: tuple[Span, ...], config: ModelConfig) -> StepBatch:
    """A batch with tables of groups of ``spans``, with those of one model's groups alone."""
    return replace(batch, page_tables=tuple(batch.page_tables[spans.index(span)] for span in config.spans))


_Carried = tuple[jax.Array, DeviceState, jax.Array, jax.Array]
"""Tokens taken in (i32 []), the state, the latest token of each row (i32 [R]), drafts so far (i32 [R, drafts])."""


def take_in(
    model: CausalLM, state: DeviceState, batch: StepBatch, *, draft: DraftGraph
) -> tuple[DeviceState, jax.Array]:
    """Runs the draft model's layers over a batch.

    Returns:
        The state with what they keep of it, and the hidden states [T, D].
    """
    groups_batch = of_groups(batch, draft.spans, model.config)
    row, position, ragged = groups_batch.ragged(page_size=state.kv[0].page_size)
    result = model(groups_batch.tokens, position, state.draft_kv, ragged, prompt_len=groups_batch.prompt_len[row])
    return replace(state, draft_kv=result.kv), result.hidden


def propose(
    weights: tuple[jax.Array, ...],
    state: DeviceState,
    batch: StepBatch,
    *,
    merged: Callable[[tuple[jax.Array, ...]], CausalLM],
    drafts: int,
    draft: DraftGraph,
) -> tuple[DeviceState, StepBatch]:
    """Fills the places of drafts with tokens that the draft model samples, one after another.

    It samples as the target model will, with the same noise, so that the two often take the same token (a Gumbel
    coupling: Daliri et al. 2024, arXiv:2408.07978), and the head `verify` needs to know nothing of the draft model's
    probabilities.

    Args:
        weights: the draft model's weights.
        state: the state that ``begin`` returned.
        batch: in the drafted family, each row a known token and places for its drafts.
        merged: the draft model with these weights.
        drafts: most drafts of a row.
        draft: the static side of the draft model.

    Returns:
        The state, in which the draft model has computed the known tokens and all drafts, and the batch with the drafts.
    """
    rows, slot, vocab_size = state.rows, batch.slot, state.sampler.vocab_size
    first, count = batch.query_start[:-1], jnp.diff(batch.query_start)
    nowhere = batch.tokens.shape[0]
    known = batch.tokens[jnp.minimum(first, nowhere - 1)]
    alive = (batch.kv_len > 0) & (known != ENDED)
    words = rows.word("sampling", slot)

    def once(carried: _Carried) -> _Carried:
        done, state, token, found = carried
        done, arrays = jax.lax.optimization_barrier((done, weights))  # as in the loop of decode steps
        model = merged(arrays)
        here = alive & (done < count)
        one = replace(
            batch,
            tokens=token,
            query_start=jnp.arange(len(slot) + 1, dtype=jnp.int32),
            kv_len=jnp.where(here, batch.kv_len - count + 1 + done, 0),
            decode=True,
        )
        state, hidden = take_in(model, state, one, draft=draft)
        wanted = alive & (done + 1 < count)
        asked = SamplingBatch.from_words(words, slot=slot, samples=wanted, position=one.kv_len)

        def next_tokens() -> jax.Array:
            logits = _as_wide(model.logits(hidden, up_to_last(wanted)), vocab_size)
            chosen = sampler.choose(logits, state.sampler, asked, last_token=token, max_logprobs=0, uncounted=found)
            return chosen.tokens

        # The last draft only leaves its KV entries: the next step may begin after it.
        token = jax.lax.cond(jnp.any(wanted), next_tokens, lambda: token)
        found = found.at[:, done].set(jnp.where(wanted, token, vocab_size), mode="drop")
        return done + 1, state, token, found

    none = jnp.full((len(slot), drafts), vocab_size, jnp.int32)
    start = (jnp.int32(0), state, known, none)
    _, state, _, found = jax.lax.while_loop(lambda carried: jnp.any(alive & (carried[0] < count)), once, start)
    place = 1 + jnp.arange(drafts, dtype=jnp.int32)
    to = jnp.where(place < count[:, None], first[:, None] + place, nowhere)
    tokens = jnp.where(found < vocab_size, found, 0)
    return state, replace(batch, tokens=batch.tokens.at[to].set(tokens, mode="drop"))


def _as_wide(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Logits [R, .] of a vocabulary that is padded to another size."""
    size = logits.shape[1]
    if size >= vocab_size:
        return logits[:, :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, vocab_size - size)), constant_values=-jnp.inf)
