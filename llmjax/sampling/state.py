"""What the sampler remembers of each request on the device, and the small edits that set it up.

Only rows whose features say so read their slot, so the slots of other requests may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from llmjax.kernels.zeros import zeros
from llmjax.sampling.params import MAX_SCORED, MAX_WINDOW
from llmjax.sampling.settings import MAX_BANS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """Per request slot; donated through the step. S slots, V vocabulary, M bans, W one more than the tokens of
    the longest window, A scored ones.

    Where penalties look at the last tokens alone (``window``), ``prompt_seen`` and ``output_count`` are of these, and
    ``recent`` says which token leaves with each that comes: that of position p is at p % W, id + 1 if it was sampled,
    -(id + 1) if it is of the prompt, 0 where there is none.
    """

    prompt_seen: jax.Array  # bool [S, V]: the token occurs in the prompt
    output_count: jax.Array  # u16 [S, V]: how often it was sampled, saturating
    logit_bias: jax.Array  # f32 [S, V]: added to the logits; -inf: forbidden
    ban_previous: jax.Array  # i32 [S, M]: the ban holds after this token
    ban_token: jax.Array  # i32 [S, M]: the forbidden token; V: no ban
    recent: jax.Array  # i32 [S, W]
    scored: jax.Array  # i32 [S, A]: tokens whose log-probabilities are asked for; V: none

    @property
    def num_slots(self) -> int:
        return int(self.prompt_seen.shape[0])

    @property
    def vocab_size(self) -> int:
        return int(self.prompt_seen.shape[1])

    @property
    def max_scored(self) -> int:
        return int(self.scored.shape[1])


def make_sampler_state(
    *,
    num_slots: int,
    vocab_size: int,
    max_bans: int = MAX_BANS,
    max_window: int = MAX_WINDOW,
    max_scored: int = MAX_SCORED,
) -> SamplerState:
    """Slots that forbid nothing and have seen nothing: 7 bytes a slot and token."""
    return SamplerState(
        prompt_seen=zeros((num_slots, vocab_size), bool),
        output_count=zeros((num_slots, vocab_size), jnp.uint16),
        logit_bias=zeros((num_slots, vocab_size), jnp.float32),
        ban_previous=jnp.full((num_slots, max_bans), -1, jnp.int32),
        ban_token=jnp.full((num_slots, max_bans), vocab_size, jnp.int32),
        recent=jnp.zeros((num_slots, max_window + 1), jnp.int32),
        scored=jnp.full((num_slots, max_scored), vocab_size, jnp.int32),
    )


def sampler_state_bytes(
    *,
    num_slots: int,
    vocab_size: int,
    max_bans: int = MAX_BANS,
    max_window: int = MAX_WINDOW,
    max_scored: int = MAX_SCORED,
) -> int:
    """What `make_sampler_state` takes."""
    return num_slots * (7 * vocab_size + 8 * max_bans + 4 * (max_window + 1 + max_scored))


def reset_slot(state: SamplerState, slot: jax.Array, bias_fill: jax.Array) -> SamplerState:
    """Forgets the slot's last request; every token's bias becomes ``bias_fill`` (0, or -inf to forbid all)."""
    unseen = jnp.zeros(state.vocab_size, bool)
    return SamplerState(
        prompt_seen=_with_row(state.prompt_seen, slot, unseen),
        output_count=state.output_count.at[slot].set(0),
        logit_bias=state.logit_bias.at[slot].set(bias_fill),
        ban_previous=state.ban_previous.at[slot].set(-1),
        ban_token=state.ban_token.at[slot].set(state.vocab_size),
        recent=state.recent.at[slot].set(0),
        scored=state.scored.at[slot].set(state.vocab_size),
    )


def add_prompt_tokens(state: SamplerState, slot: jax.Array, ids: jax.Array) -> SamplerState:
    """Marks ``ids`` (i32 [K], padded with V) as seen in the prompt."""
    present = jnp.zeros(state.vocab_size, jnp.int32).at[ids].set(1, mode="drop")
    return replace(state, prompt_seen=_with_row(state.prompt_seen, slot, state.prompt_seen[slot] | (present > 0)))


def add_output_tokens(state: SamplerState, slot: jax.Array, ids: jax.Array) -> SamplerState:
    """Counts ``ids`` (i32 [K], padded with V) as sampled: a preempted request starts again with its output."""
    counts = state.output_count[slot].astype(jnp.int32).at[ids].add(1, mode="drop")
    counts = jnp.minimum(counts, jnp.iinfo(jnp.uint16).max).astype(jnp.uint16)
    return replace(state, output_count=state.output_count.at[slot].set(counts))


def set_bias(state: SamplerState, slot: jax.Array, ids: jax.Array, values: jax.Array) -> SamplerState:
    """Replaces the bias of ``ids`` (i32 [K], distinct, padded with V) by ``values`` (f32 [K])."""
    return replace(state, logit_bias=state.logit_bias.at[slot, ids].set(values, mode="drop"))


def set_bans(state: SamplerState, slot: jax.Array, previous: jax.Array, tokens: jax.Array) -> SamplerState:
    """Replaces the slot's bans: ``tokens`` (i32 [M], padded with V) each forbidden after ``previous`` (i32 [M])."""
    return replace(
        state,
        ban_previous=state.ban_previous.at[slot].set(previous),
        ban_token=state.ban_token.at[slot].set(tokens),
    )


def set_recent(state: SamplerState, slot: jax.Array, recent: jax.Array) -> SamplerState:
    """Replaces what the slot knows of its last tokens (i32 [W])."""
    return replace(state, recent=state.recent.at[slot].set(recent))


def set_scored(state: SamplerState, slot: jax.Array, ids: jax.Array) -> SamplerState:
    """Replaces the tokens whose log-probabilities are asked for (i32 [A], padded with V)."""
    return replace(state, scored=state.scored.at[slot].set(ids))


def _with_row(array: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
    """Replaces a slot's row by a slice update: not every device can scatter bytes."""
    return jax.lax.dynamic_update_index_in_dim(array, row, slot, axis=0)
