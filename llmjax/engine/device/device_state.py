"""The state that stays on the device from step to step, and the output that a step leaves for the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from llmjax.engine.core.interfaces import NO_TOKEN as NO_TOKEN
from llmjax.engine.core.interfaces import NOT_FINITE as NOT_FINITE
from llmjax.engine.device.media import MediaShape, MediaState, make_media_state
from llmjax.engine.device.rows import RowState, make_row_state
from llmjax.engine.loading.memory import KVPlan
from llmjax.models.config import ModelConfig
from llmjax.models.layers.state import LayerStack, make_stacks
from llmjax.sampling.logprobs import LogprobArrays
from llmjax.sampling.state import SamplerState, make_sampler_state

POOLED = 0  # in ``StepOutput.tokens`` of a model that makes vectors: the row's vector is there


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Everything that lives from step to step, donated through it."""

    kv: tuple[LayerStack, ...]  # the stacks of all layers; empty where only heads run
    rows: RowState
    sampler: SamplerState
    draft_kv: tuple[LayerStack, ...] = ()  # the stacks of a draft model's layers, with the same page numbers
    media: MediaState | None = None  # feature rows of images; None: the model sees none
    pooled: jax.Array | None = None  # f32 [slots, D], sums of hidden states; None: the model generates

    @property
    def without_layers(self) -> DeviceState:
        """The state without what layers keep, which is all that heads need."""
        return replace(self, kv=(), draft_kv=(), media=None)

    def with_layers(self, other: DeviceState) -> DeviceState:
        """This state, with what the layers keep in ``other``."""
        return replace(self, kv=other.kv, draft_kv=other.draft_kv, media=other.media)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ends:
    """The end of each row after a forward pass, from which tokens are sampled now or in a later dispatch. R rows."""

    hidden: jax.Array  # [R, D], after the row's last token
    last_token: jax.Array  # i32 [R], the row's last input; ENDED where there is none
    kv_len: jax.Array  # i32 [R]
    slot: jax.Array  # i32 [R]
    steps: jax.Array  # i32 [R], tokens to sample; 0 in the middle of a prompt


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """Everything that the host may read, one dispatch late. K is ``Bucket.steps``."""

    tokens: jax.Array  # i32 [K, R]; NO_TOKEN where the row did not sample, NOT_FINITE where it could not
    logprobs: LogprobArrays | None  # for the sampled tokens [K, R]; zeros unless a row asks; None: the model pools
    prompt_logprobs: LogprobArrays | None  # for ``targets`` [T]; zeros unless a row asks; None in the decode family
    ends: Ends | None  # the rows' ends after the last step; None: the model pools
    vectors: jax.Array | None = None  # f32 [R, size], pooled; None: the model generates
    token_vectors: jax.Array | None = None  # f32 [T, size], of each token; zeros unless a row asks


def make_device_state(
    scales: jax.Array | None,
    draft_scales: jax.Array | None = None,
    *,
    config: ModelConfig,
    vocab_size: int,
    plan: KVPlan,
    num_slots: int,
    as_bits: bool,
    as_words: bool,
    draft: ModelConfig | None = None,
    media: MediaShape | None = None,
) -> DeviceState:
    """A state without KV entries or tokens, in which no slot has a sequence.

    Args:
        scales, draft_scales: `LoadedModel.kv_calibration` of the model, and of the draft model.
        config: configuration of the part of the model that a device runs.
        vocab_size: size of the whole model's vocabulary.
        as_bits, as_words: as in ``llmjax.kernels.attention.make_pages``.
        draft: the draft model, if there is one.
        media: the shape of the media pool; None: the model sees nothing.
    """
    stacks = partial(
        make_stacks,
        num_pages={group.span: group.num_pages for group in plan.groups},
        page_size=plan.page_size,
        dtype=plan.layout.dtype,
        as_bits=as_bits,
        as_words=as_words,
    )
    kv = stacks(config.states, calibration=scales)
    draft_kv = () if draft is None else stacks(draft.states, calibration=draft_scales)
    # A model that makes vectors samples nothing.
    sampler = make_sampler_state(num_slots=num_slots, vocab_size=1 if config.pooler is not None else vocab_size)
    rows = make_row_state(num_slots=num_slots, num_groups=len(plan.groups), pages_per_sequence=plan.pages_per_sequence)
    pooled = None if config.pooler is None else jnp.zeros((num_slots, config.hidden_size), jnp.float32)
    pool = None if media is None else make_media_state(media, num_slots=num_slots)
    return DeviceState(kv=kv, draft_kv=draft_kv, rows=rows, sampler=sampler, media=pool, pooled=pooled)
