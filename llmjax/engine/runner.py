"""Runs planned steps on the device: owns weights and state, packs batches, dispatches, hands results back late."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kernels.attention import make_pages
from llmjax.engine.batch import MAX_STOPS, NO_STOP, BatchLayout, Bucket, make_buckets
from llmjax.engine.memory import KVPlan
from llmjax.engine.model import LoadedModel
from llmjax.engine.programs import Executable, StepPrograms
from llmjax.engine.request import Sequence
from llmjax.engine.scheduler import Row, StepPlan
from llmjax.engine.slots import SlotEditor
from llmjax.engine.step import NO_TOKEN, DeviceState, StepOutput, step
from llmjax.host_memory import keep_freed_blocks
from llmjax.platforms import Platform
from llmjax.sampling.logprobs import TokenLogprobs
from llmjax.sampling.rows import ROW_WORDS, RequestSampling
from llmjax.sampling.state import make_sampler_state


@dataclass(frozen=True)
class HostLogprobs:
    """``TokenLogprobs`` on the host."""

    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def read(cls, logprobs: TokenLogprobs) -> HostLogprobs:
        """Waits for the device and copies."""
        parts = (logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs)
        return cls(*(np.asarray(part) for part in parts))


@dataclass(frozen=True)
class PendingStep:
    """A dispatched step whose result has not been read."""

    plan: StepPlan
    output: StepOutput

    def tokens(self) -> list[list[int]]:
        """Waits for the tokens that each row sampled."""
        rows = np.asarray(self.output.tokens).T.tolist()
        return [[token for token in row if token != NO_TOKEN] for row in rows]


class Runner:
    """The device side of the engine.

    Args:
        model: weights and definition.
        platform: where they are.
        kv_plan: shape of the KV cache.
        max_num_seqs: slots.
        max_num_batched_tokens: tokens of the largest step.
        max_logprobs: top alternatives reported.
        decode_steps: decode steps a dispatch may take.
        compile_threads: compilations at once; 0: one a core.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        platform: Platform,
        kv_plan: KVPlan,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_logprobs: int,
        decode_steps: int = 1,
        compile_threads: int = 0,
    ) -> None:
        self.model = model
        self._max_logprobs = max_logprobs
        self._device = platform.device
        config = model.config
        scales = model.kv_calibration
        with jax.default_device(platform.device):
            kv = tuple(
                make_pages(
                    num_pages=kv_plan.groups[config.group_of(layer)].num_pages,
                    page_size=kv_plan.page_size,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    dtype=kv_plan.layout.dtype,
                    as_bits=platform.is_cpu,
                    calibration=None if scales is None else jnp.asarray(scales[layer]),
                )
                for layer in range(config.num_layers)
            )
            sampler = make_sampler_state(num_slots=max_num_seqs, vocab_size=config.vocab_size)
            self._state = DeviceState(kv=kv, last_token=jnp.zeros(max_num_seqs, jnp.int32), sampler=sampler)
        self._weights = tuple(model.params.values())
        # Taken now: compiler threads must not look at the state while steps replace it.
        self._shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (self._weights, self._state)
        )
        self._slots = SlotEditor(sampler)
        # Settings of each slot's request as the device takes them, and what else its slot needs.
        self._settings = np.zeros((max_num_seqs, ROW_WORDS), np.int32)
        self._stops = np.full((max_num_seqs, MAX_STOPS), NO_STOP, np.int32)
        buckets = make_buckets(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, decode_steps=decode_steps
        )
        self._layouts = {
            bucket: BatchLayout(
                bucket=bucket,
                num_slots=max_num_seqs,
                pages_per_sequence=kv_plan.pages_per_sequence,
                num_groups=len(kv_plan.groups),
            )
            for bucket in buckets
        }
        if platform.is_cpu:
            keep_freed_blocks()
        self.programs = StepPrograms(
            self._compile,
            buckets,
            threads=compile_threads or os.cpu_count() or 1,
        )

    def warm_up(self) -> None:
        """Waits until everything that requests may need is compiled."""
        self.programs.wait_all()
        self._slots.compile()

    def most_steps(self, rows: int) -> int:
        """Decode steps that a dispatch of so many rows may take now."""
        return self.programs.most_steps(rows)

    def dispatch(
        self, plan: StepPlan, *, tables: list[npt.NDArray[np.int32]], sampling: dict[Sequence, RequestSampling]
    ) -> PendingStep:
        """Starts a step and returns without waiting for it.

        Args:
            tables: page tables by slot, one a KV group.
            sampling: resolved sampling of the plan's sequences.
        """
        for sequence in plan.admitted:
            self._set_up(sequence, sampling[sequence])
        for row in plan.rows:
            if row.samples:
                self._before_sampling(row, sampling[row.sequence])
        program = self.programs.pick(plan)
        packed = self._layouts[program.bucket].pack(plan, tables=tables, sampling=self._settings, stops=self._stops)
        self._state, output = program.executable(self._weights, self._state, packed)
        output.tokens.copy_to_host_async()
        return PendingStep(plan=plan, output=output)

    def close(self) -> None:
        """Stops compiling."""
        self.programs.close()

    def _set_up(self, sequence: Sequence, sampling: RequestSampling) -> None:
        count = sequence.num_prompt_tokens
        self._settings[sequence.slot] = sampling.words
        self._stops[sequence.slot] = NO_STOP
        if len(sequence.tokens) - count >= sampling.min_tokens:
            self._set_stops(sequence)
        if sampling.uses_slot:
            sampler = self._slots.set_up(
                self._state.sampler,
                sequence.slot,
                sampling,
                prompt=sequence.tokens[:count],
                output=sequence.tokens[count:],
            )
            self._state = replace(self._state, sampler=sampler)

    def _set_stops(self, sequence: Sequence) -> None:
        ids = sorted(sequence.request.stop_token_ids)[:MAX_STOPS]
        self._stops[sequence.slot, : len(ids)] = ids

    def _before_sampling(self, row: Row, sampling: RequestSampling) -> None:
        sequence = row.sequence
        produced = row.start + row.count - sequence.num_prompt_tokens  # output tokens before the one sampled now
        if sampling.min_tokens and produced == sampling.min_tokens:
            sampler = self._slots.allow_stops(self._state.sampler, sequence.slot, sampling)
            self._state = replace(self._state, sampler=sampler)
            self._set_stops(sequence)
        if sampling.bans_vary:
            # The host may not know the last token yet; the ban is conditional on it.
            history = sequence.tokens[: row.start + row.count - 1]
            sampler = self._slots.ban(self._state.sampler, sequence.slot, sampling, history=history)
            self._state = replace(self._state, sampler=sampler)

    def _compile(self, bucket: Bucket) -> Executable:
        layout = self._layouts[bucket]
        run = partial(
            step,
            graph=self.model.graph,
            names=tuple(self.model.params),
            layout=layout,
            max_logprobs=self._max_logprobs,
        )
        packed = jax.ShapeDtypeStruct(
            (layout.size,), jnp.int32, sharding=jax.sharding.SingleDeviceSharding(self._device)
        )
        return jax.jit(run, donate_argnums=1).lower(*self._shapes, packed).compile()
