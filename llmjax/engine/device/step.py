"""The jitted step: one dispatch unpacks the batch, runs the model and samples; results stay on the device. If the host
has to make masks before tokens can be sampled, a second dispatch samples.

A decode dispatch may take several steps in a loop: each row's sampled token is its next input, and a row leaves when it
has its tokens or samples a stop id. With drafts of the next tokens it takes one step over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from llmjax import models
from llmjax.engine.adapters.layout import AdapterLayout
from llmjax.engine.device.batch import BatchLayout, StepBatch
from llmjax.engine.device.device_state import NO_TOKEN, DeviceState, Ends, StepOutput
from llmjax.engine.device.heads import Sampled, ends, few_rows, sample, score, verify
from llmjax.engine.device.pooling import pool
from llmjax.engine.drafts.proposal import DraftGraph, of_groups, propose, take_in
from llmjax.kernels.qtensor import rounding_decodes
from llmjax.models import ModelGraph
from llmjax.models.layers.state import Span
from llmjax.sampling.logprobs import LogprobArrays, no_logprobs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Loop:
    """The values that a decode dispatch carries from step to step."""

    done: jax.Array  # i32 []: steps taken
    state: DeviceState
    tokens: jax.Array  # as in StepOutput
    logprobs: LogprobArrays
    ends: Ends


def step(
    weights: tuple[jax.Array, ...],
    state: DeviceState,
    packed: jax.Array,
    before: jax.Array | None = None,
    *,
    graph: ModelGraph,
    names: tuple[str, ...],
    layout: BatchLayout,
    max_logprobs: int,
    draft: DraftGraph | None = None,
    spans: tuple[Span, ...] | None = None,
    adapters: AdapterLayout | None = None,
) -> tuple[DeviceState, StepOutput]:
    """Runs one dispatch: ``forward`` and its heads.

    Args:
        weights: the model's weights in the order of ``names``, then those of the draft model, then the arrays of
            adapters. A tuple, because sorting a dict's keys at every dispatch costs time.
        state: donated.
        packed: i32 [layout.size], from ``BatchLayout.pack``.
        graph: the model's graph definition (static).
        names: Hugging Face names of the weights (static).
        layout: shapes of this bucket (static).
        max_logprobs: top alternatives that are reported (static).
        before: as in ``forward``.
        draft: a model that makes drafts (static); None: there is none.
        spans: spans of the groups of layers for which the batch has page tables, where this rank has only some of the
            model's layers (static); None: the model's own.
        adapters: the adapters that rows may have (static); None: none has one.
    """
    state, batch = begin(state, packed, layout=layout)
    of = state.rows.word("adapter", batch.slot[batch.row])  # the place of each token's adapter
    ends_at = len(names) + (0 if draft is None else len(draft.names))
    own, others, changes = weights[: len(names)], weights[len(names) : ends_at], weights[ends_at:]

    def merged(own: tuple[jax.Array, ...], changes: tuple[jax.Array, ...] = changes) -> models.CausalLM:
        return _merged(own, changes, of, graph=graph, names=names, adapters=adapters)

    def run(model: models.CausalLM, state: DeviceState, batch: StepBatch) -> tuple[DeviceState, jax.Array]:
        groups = spans if draft is None else draft.spans
        return forward(model, state, batch if groups is None else of_groups(batch, groups, graph.config), before)

    def draft_merged(others: tuple[jax.Array, ...]) -> models.CausalLM:
        assert draft is not None
        return _merged(others, graph=draft.graph, names=draft.names)

    def followed(others: tuple[jax.Array, ...], state: DeviceState, batch: StepBatch) -> DeviceState:
        """With what the draft model keeps of the batch."""
        return state if draft is None else take_in(draft_merged(others), state, batch, draft=draft)[0]

    if graph.config.pooler is not None:
        model = merged(own)
        state, hidden = run(model, state, batch)
        position = batch.ragged(page_size=state.kv[0].page_size)[1]
        state, pooled = pool(model, state, hidden, batch, position=position)
        return state, StepOutput(
            tokens=pooled.state[None],
            logprobs=None,
            prompt_logprobs=None,
            ends=None,
            vectors=pooled.vectors,
            token_vectors=pooled.token_vectors,
        )

    if layout.bucket.drafts:
        if draft is not None:
            quick = rounding_decodes(others)
            state, batch = propose(quick, state, batch, merged=draft_merged, drafts=layout.bucket.drafts, draft=draft)
        model = merged(rounding_decodes(own))  # otherwise sampled tokens would depend on whether there are drafts
        state, hidden = run(model, state, batch)
        state, sampled = verify(model, state, hidden, batch, drafts=layout.bucket.drafts, max_logprobs=max_logprobs)
        return state, StepOutput(
            tokens=sampled.tokens, logprobs=sampled.logprobs, prompt_logprobs=None, ends=ends(hidden, batch)
        )

    if not layout.bucket.decode:
        model = merged(own)
        state, hidden = run(model, state, batch)
        state = followed(others, state, batch)
        last = ends(hidden, batch)
        few = few_rows(layout.bucket.rows)
        state, sampled = sample(model, state, last, max_logprobs=max_logprobs, waits=batch.waits, few=few)
        return state, StepOutput(
            tokens=sampled.tokens[None],
            logprobs=jax.tree.map(lambda x: x[None], sampled.logprobs),
            prompt_logprobs=score(
                model, state, hidden, batch, vocab_size=state.sampler.vocab_size, max_logprobs=max_logprobs
            ),
            ends=last,
        )

    def once(loop: _Loop) -> _Loop:
        # The barrier ties the weights to the iteration. Otherwise XLA moves what depends only on them out of the loop,
        # and converts the whole embedding to f32 at every dispatch.
        done, now_own, now_others, now_changes = jax.lax.optimization_barrier((loop.done, own, others, changes))
        model, now = merged(rounding_decodes(now_own), now_changes), batch.after(done, loop.state.rows)
        state, hidden = run(model, loop.state, now)
        state = followed(rounding_decodes(now_others), state, now)
        last = ends(hidden, now)
        state, sampled = sample(model, state, last, max_logprobs=max_logprobs, waits=now.waits)
        return _Loop(
            done=done + 1,
            state=state,
            tokens=loop.tokens.at[done].set(sampled.tokens),
            logprobs=jax.tree.map(lambda all, new: all.at[done].set(new), loop.logprobs, sampled.logprobs),
            ends=last,
        )

    steps, rows = layout.bucket.steps, layout.bucket.rows
    nothing = no_logprobs(steps * rows, max_logprobs=max_logprobs, max_scored=state.sampler.max_scored)
    loop = _Loop(
        done=jnp.int32(0),
        state=state,
        tokens=jnp.full((steps, rows), NO_TOKEN, jnp.int32),
        logprobs=jax.tree.map(lambda x: x.reshape(steps, rows, *x.shape[1:]), nothing),
        ends=Ends(
            hidden=jnp.zeros((rows, graph.config.hidden_size), graph.activation_dtype),
            last_token=batch.tokens,
            kv_len=batch.kv_len,
            slot=batch.slot,
            steps=batch.steps,
        ),
    )
    if steps == 1:
        loop = once(loop)  # no condition to wait for
    else:
        loop = jax.lax.while_loop(
            lambda loop: (loop.done < steps) & jnp.any(batch.after(loop.done, loop.state.rows).kv_len > 0),
            once,
            loop,
        )
    return loop.state, StepOutput(tokens=loop.tokens, logprobs=loop.logprobs, prompt_logprobs=None, ends=loop.ends)


def pass_on(
    weights: tuple[jax.Array, ...],
    state: DeviceState,
    packed: jax.Array,
    before: jax.Array | None = None,
    *,
    graph: ModelGraph,
    names: tuple[str, ...],
    layout: BatchLayout,
    spans: tuple[Span, ...],
    adapters: AdapterLayout | None = None,
) -> tuple[DeviceState, jax.Array]:
    """Runs one dispatch of a stage that is not the last one: ``forward`` alone.

    The tokens that rows sample are not known here; the last stage sends them later, with the lengths of these rows.

    Args:
        weights, state, packed, before, graph, names, layout, spans, adapters: as for ``step``.

    Returns:
        The state after every row's tokens, and hidden states [T, D].
    """
    state, batch = begin(state, packed, layout=layout)
    bucket = layout.bucket
    if bucket.decode:
        batch = batch.after(jnp.int32(0), state.rows)
    of = state.rows.word("adapter", batch.slot[batch.row])
    own, changes = weights[: len(names)], weights[len(names) :]
    own = rounding_decodes(own) if bucket.decode or bucket.drafts else own
    model = _merged(own, changes, of, graph=graph, names=names, adapters=adapters)
    state, hidden = forward(model, state, of_groups(batch, spans, graph.config), before)
    rows = state.rows
    taken_in = jnp.where(batch.kv_len > 0, batch.slot, rows.length.shape[0])
    length = rows.length.at[taken_in].set(batch.kv_len, mode="drop")
    return replace(state, rows=replace(rows, length=length)), hidden


def sample_masked(
    weights: tuple[jax.Array, ...],
    state: DeviceState,
    ends: Ends,
    mask: jax.Array,
    *,
    graph: ModelGraph,
    names: tuple[str, ...],
    decode: bool,
    max_logprobs: int,
    adapters: AdapterLayout | None = None,
) -> tuple[DeviceState, Sampled]:
    """The second dispatch of a step whose batch ``waits``.

    Args:
        weights, names, graph, adapters: as for ``step``, of the model without its layers.
        max_logprobs: as for ``step``.
        state: the state after the first dispatch, without what layers keep; donated.
        ends: the rows' ends, which the first dispatch returned.
        mask: i32 [R, ceil(V / 32)], the tokens that each row may sample, as bits.
        decode: whether the first dispatch was of the decode family.

    Returns:
        The state, and the sampled tokens as in ``StepOutput``.
    """
    own, changes = weights[: len(names)], weights[len(names) :]
    of = state.rows.word("adapter", ends.slot)
    own = rounding_decodes(own) if decode else own
    model = _merged(own, changes, of, graph=graph, names=names, adapters=adapters)
    few = 0 if decode else few_rows(mask.shape[0])
    state, sampled = sample(model, state, ends, max_logprobs=max_logprobs, mask=mask, few=few)
    return state, jax.tree.map(lambda x: x[None], sampled)


def _merged(
    arrays: tuple[jax.Array, ...],
    changes: tuple[jax.Array, ...] = (),
    of: jax.Array | None = None,
    *,
    graph: ModelGraph,
    names: tuple[str, ...],
    adapters: AdapterLayout | None = None,
) -> models.CausalLM:
    """The model with its weights and with the adapters that ``changes`` holds, of rows with places ``of``."""
    params = dict(zip(names, arrays, strict=True))
    if adapters is not None:
        assert of is not None
        params = adapters.applied(params, changes, of)
    return models.merge(graph, params)


def begin(state: DeviceState, packed: jax.Array, *, layout: BatchLayout) -> tuple[DeviceState, StepBatch]:
    """The state with the host's changes applied, and the batch. A second call, after ``forward`` and before the heads,
    changes nothing."""
    rows = layout.changes(packed).made(state.rows)
    state = replace(state, rows=rows)
    if state.media is not None and layout.media is not None and layout.media.axes:
        state = replace(state, media=replace(state.media, delta=layout.deltas(packed, state.media.delta)))
    return state, layout.batch(packed, rows)


def forward(
    model: models.CausalLM, state: DeviceState, batch: StepBatch, before: jax.Array | None = None
) -> tuple[DeviceState, jax.Array]:
    """Runs the layers over the rows' tokens.

    Args:
        before: [T, D], hidden states from the stages before; None: there are no stages before.

    Returns:
        The state with what the layers keep of the tokens, and the hidden states [T, D] that heads take.
    """
    row, position, ragged = batch.ragged(page_size=state.kv[0].page_size)
    types = None
    if model.config.token_types is not None and before is None:
        types = (position >= batch.second_start[row]).astype(jnp.int32)
    result = model(
        batch.tokens,
        position,
        state.kv,
        ragged,
        prompt_len=batch.prompt_len[row],
        types=types,
        before=before,
        seen=None if state.media is None else state.media.seen(batch.media, slot=batch.slot[row], position=position),
    )
    return replace(state, kv=result.kv), result.hidden
