"""What lives on the device from step to step, and what a step leaves for the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from llmjax.engine.core.interfaces import NO_TOKEN as NO_TOKEN
from llmjax.engine.core.interfaces import NOT_FINITE as NOT_FINITE
from llmjax.engine.device.rows import RowState
from llmjax.models.layers.state import LayerStack
from llmjax.sampling.logprobs import LogprobArrays
from llmjax.sampling.state import SamplerState

POOLED = 0  # in ``StepOutput.tokens`` of a model that makes vectors: the row's is there


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Everything that lives from step to step, donated through it."""

    kv: tuple[LayerStack, ...]  # of all layers; none where only heads run
    rows: RowState
    sampler: SamplerState
    draft_kv: tuple[LayerStack, ...] = ()  # of the layers of a draft model, on pages of the same numbers
    pooled: jax.Array | None = None  # f32 [slots, D], sums of hidden states; None: the model generates

    @property
    def without_layers(self) -> DeviceState:
        """What heads need."""
        return replace(self, kv=(), draft_kv=())

    def with_layers(self, other: DeviceState) -> DeviceState:
        """With what the layers keep in ``other``."""
        return replace(self, kv=other.kv, draft_kv=other.draft_kv)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ends:
    """Where a forward pass has left each row: what is sampled from, now or in a dispatch that follows. R rows."""

    hidden: jax.Array  # [R, D], behind the row's last token
    last_token: jax.Array  # i32 [R], the row's last input; ENDED where there is none
    kv_len: jax.Array  # i32 [R]
    slot: jax.Array  # i32 [R]
    steps: jax.Array  # i32 [R], tokens to sample; 0 in the middle of a prompt


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host may read, one dispatch late. K is ``Bucket.steps``."""

    tokens: jax.Array  # i32 [K, R]; NO_TOKEN where the row did not sample, NOT_FINITE where it could not
    logprobs: LogprobArrays | None  # of the sampled tokens [K, R]; zeros unless a row asks; None: the model pools
    prompt_logprobs: LogprobArrays | None  # of ``targets`` [T]; zeros unless a row asks; None in the decode family
    ends: Ends | None  # of the last step; None: the model pools
    vectors: jax.Array | None = None  # f32 [R, size], pooled; None: the model generates
    token_vectors: jax.Array | None = None  # f32 [T, size], of each token; zeros unless a row asks
