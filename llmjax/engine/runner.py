"""Runs planned steps on the device: owns weights and state, packs batches, dispatches, hands results back late."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np
import numpy.typing as npt

from llmjax.engine.batch import MAX_STOPS, NO_STOP
from llmjax.engine.compile_threads import CompileThreads
from llmjax.engine.device_state import NO_TOKEN, StepOutput
from llmjax.engine.programs import StepCompiler, StepPrograms
from llmjax.engine.request import Sequence
from llmjax.engine.scheduler import Row, StepPlan
from llmjax.engine.slots import SlotEditor
from llmjax.host_memory import keep_freed_blocks
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.sampling.logprobs import LogprobArrays
from llmjax.sampling.settings import SETTINGS_WORDS, RequestSampling


@dataclass(frozen=True)
class HostLogprobs:
    """``LogprobArrays`` on the host."""

    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def read(cls, logprobs: LogprobArrays) -> HostLogprobs:
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
        compiler: knows weights, state and buckets.
        compile_threads: compilations at once; 0: one per core.
    """

    def __init__(self, compiler: StepCompiler, *, compile_threads: int = 0) -> None:
        self.model = compiler.model
        self._layouts = compiler.layouts
        self._weights = compiler.weights
        self._state = compiler.make_state()
        # Settings of each slot's request as the device takes them, and what else its slot needs.
        self._settings = np.zeros((compiler.max_num_seqs, SETTINGS_WORDS), np.int32)
        self._stops = np.full((compiler.max_num_seqs, MAX_STOPS), NO_STOP, np.int32)
        if compiler.platform.is_cpu:
            keep_freed_blocks()
        self._threads = CompileThreads(compile_threads or usable_cores())
        self._slot_editor = self._threads.submit(SlotEditor(self._state.sampler, cache=compiler.cache).compiled)
        buckets = list(self._layouts)
        kept = [bucket for bucket in buckets if compiler.keeps(bucket)]
        self.programs = StepPrograms(compiler.compile, buckets, threads=self._threads, kept=kept)

    @property
    def sampler_bytes(self) -> int:
        """Of the device's memory that the sampler's slots take."""
        return sum(array.nbytes for array in jax.tree.leaves(self._state.sampler))

    def wait_ready(self) -> None:
        """Returns when any request can be computed without waiting for the compiler.

        Raises:
            CompileError: no request can.
        """
        self.programs.wait_first()
        self._slot_editor.result()

    def warm_up(self) -> None:
        """Waits until everything that requests may need is compiled; raises as `wait_ready`."""
        self.wait_ready()
        self.programs.wait_all()

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

    def close(self, *, wait: bool = True) -> None:
        """Stops compiling.

        Args:
            wait: for the compilations that have begun, which hold the weights.
        """
        self._threads.close(wait=wait)

    @property
    def _slots(self) -> SlotEditor:
        return self._slot_editor.result()

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
