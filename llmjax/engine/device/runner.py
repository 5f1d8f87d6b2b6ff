"""Runs planned steps on the device: owns weights and state, packs batches, dispatches, hands results back late."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt

from llmjax.engine.core.layer_states import TableChanges
from llmjax.engine.core.request import Sequence
from llmjax.engine.core.scheduler import Row, StepPlan
from llmjax.engine.core.tier import PageContent
from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.device_state import NO_TOKEN, StepOutput
from llmjax.engine.device.page_moves import MOST_PAGES, PageMover, ReadInTurn
from llmjax.engine.device.rows import Ints, NewRow, row_words
from llmjax.engine.device.slots import SlotEditor, TableEditor
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.masked import MaskedPrograms
from llmjax.engine.programs.process import MASKED, compile_apart
from llmjax.engine.programs.step_programs import StepPrograms
from llmjax.engine.programs.threads import CompileThreads
from llmjax.engine.ranks.group import Alone
from llmjax.engine.ranks.stages import LastStage, StagedStep
from llmjax.engine.ranks.wire import Array, RunMasked, RunStep
from llmjax.errors import InvalidRequest, LLMJaxError
from llmjax.host_memory import keep_freed_blocks
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.sampling.masks import bit_masks
from llmjax.sampling.settings import RequestSampling

if TYPE_CHECKING:
    from llmjax.engine.constraint import Constraint

logger = logging.getLogger(__name__)


def _nothing() -> None:
    return


@dataclass(frozen=True)
class PendingStep:
    """A dispatched step whose result has not been read. One whose plan ``waits`` has none before `Runner.sample`.

    Attributes:
        result: its output; waits where other processes have to have their part of it first.
        when_read: what to do when its tokens are there.
    """

    plan: StepPlan
    bucket: Bucket
    result: Callable[[], StepOutput]
    when_read: Callable[[], None] = _nothing

    @property
    def output(self) -> StepOutput:
        """What it leaves for the host."""
        return self.result()

    def tokens(self) -> list[tuple[int, ...]]:
        """Waits for the tokens that each row sampled."""
        tokens = np.asarray(self.output.tokens)[:, : len(self.plan.rows)]
        self.when_read()
        rows = list(zip(*tokens.tolist(), strict=True))
        if (tokens == NO_TOKEN).any():
            rows = [tuple([token for token in row if token != NO_TOKEN]) for row in rows]
        return rows


class Runner:
    """The device side of the engine.

    Args:
        compiler: knows weights, state and buckets.
        compile_threads: compilations at once; 0: one per core.
        moves_pages: pages will be read and written.
    """

    def __init__(self, compiler: StepCompiler, *, compile_threads: int = 0, moves_pages: bool = False) -> None:
        self.model = compiler.model
        self._compiler = compiler
        self._group = compiler.group
        self._layouts = compiler.layouts
        self.take_weights()
        self._state = compiler.make_state()
        self._on_host = compiler.platform.is_cpu  # where results are without being copied
        if self._on_host:
            keep_freed_blocks()
        self._threads = CompileThreads(compile_threads or usable_cores())
        where: Mapping[str, Any] = {"cache": compiler.cache, "sharding": compiler.platform.sharding}
        # Of several stages the last one alone samples.
        samplers = Alone() if compiler.is_staged else compiler.group
        self._stages = self._last_stage() if compiler.is_staged else None
        self._slot_editor = self._threads.submit(SlotEditor(self._state.sampler, group=samplers, **where).compiled)
        tables = TableEditor(self._state.rows.page_tables, group=compiler.group, **where)
        self._table_editor = self._threads.submit(tables.compiled)
        self._mover = self._threads.submit(PageMover(compiler).compiled) if moves_pages else None
        buckets = list(self._layouts)
        kept = [bucket for bucket in buckets if compiler.keeps(bucket)]
        self._apart = compile_apart(compiler, kept=kept)
        apart: Mapping[Any, Future[None]] = {} if self._apart is None else self._apart.programs
        self.programs = StepPrograms(compiler.compile, buckets, threads=self._threads, kept=kept, apart=apart)
        self._masked = MaskedPrograms(compiler, self._threads, apart.get(MASKED))  # after what all requests need

    def take_weights(self) -> None:
        """From now on steps use the weights that the model has now."""
        self._weights = self._compiler.weights
        self._head_weights = self._compiler.head_weights

    def free_state(self) -> None:
        """Gives back the memory of what lives from step to step; there are no steps before `new_state`."""
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()

    def new_state(self) -> None:
        """Begins with no key and no token."""
        self._state = self._compiler.make_state()

    @property
    def sampler_bytes(self) -> int:
        """Of the device's memory that the sampler's slots take."""
        return sum(array.nbytes for array in jax.tree.leaves(self._state.sampler))

    def wait_ready(self) -> None:
        """Returns when any request can be computed without waiting for the compiler, but for those with a grammar.

        Raises:
            CompileError: no request can.
        """
        self.programs.wait_first()
        self._slot_editor.result()
        self._table_editor.result()
        if self._mover is not None:
            self._mover.result()

    def warm_up(self) -> None:
        """Waits until everything that requests may need is compiled; raises as `wait_ready`."""
        self.wait_ready()
        self.programs.wait_all()
        self._masked.wait_all()

    def most_steps(self, rows: int) -> int:
        """Decode steps that a dispatch of so many rows may take now."""
        return self.programs.most_steps(rows)

    def most_drafts(self, rows: int) -> int:
        """Drafts of its next tokens that each of so many rows may have now."""
        return self.programs.most_drafts(rows)

    def prepare_masks(self) -> None:
        """Compiles what masked steps need, if that has not begun."""
        self._masked.prepare()

    def can_sample_masked(self, *, seconds: float = 0.0) -> bool:
        """Whether steps can be sampled under masks.

        Args:
            seconds: to wait until it is so.

        Raises:
            CompileError: they never can.
        """
        return self._masked.can_sample(seconds=seconds)

    def dispatch(
        self, plan: StepPlan, *, tables: TableChanges, sampling: Mapping[Sequence, RequestSampling]
    ) -> PendingStep:
        """Starts a step and returns without waiting for it.

        Args:
            tables: what has changed in the page tables since the dispatch before.
            sampling: resolved sampling of the plan's sequences.
        """
        if self._stages is not None:
            self._stages.finish_begun()
        admitted = set(plan.admitted)
        new = [self._new_row(row, sampling[row.sequence]) for row in plan.rows if row.sequence in admitted]
        for row in plan.rows:
            constraint = row.sequence.constraint
            if constraint is not None and constraint.rewound:
                constraint.rewound = False
                if row.sequence not in admitted:
                    new.append(_same_row(row, sampling[row.sequence]))
        for row in plan.rows:
            if row.sequence.between and row.samples:
                self._before_sampling(row, sampling[row.sequence])
        program = self.programs.pick(plan, usable=self._masked.ready) if plan.waits else self.programs.pick(plan)
        layout = self._layouts[program.bucket]
        *before, last = tables.chunks(layout.room)
        for chunk in before:
            page_tables = self._table_editor.result().write(self._state.rows.page_tables, chunk)
            self._state = replace(self._state, rows=replace(self._state.rows, page_tables=page_tables))
        packed = layout.pack(plan, new=new, tables=last)

        def run(*before: npt.NDArray[Any]) -> StepOutput:
            self._state, output = program.executable(self._weights, self._state, packed, *before)
            if not self._on_host and not plan.waits:
                output.tokens.copy_to_host_async()
            found: StepOutput = output
            return found

        if self._stages is not None:
            return self._begin(self._stages, plan, program.bucket, packed, run)
        if self._group.size > 1:
            self._group.tell(RunStep(program.bucket, Array.of(packed)))
        output = run()
        return PendingStep(plan=plan, bucket=program.bucket, result=lambda: output)

    def _begin(
        self, stages: LastStage, plan: StepPlan, bucket: Bucket, packed: Ints, run: Callable[..., StepOutput]
    ) -> PendingStep:
        step = StagedStep(
            bucket=bucket,
            packed=packed,
            slots=[row.sequence.slot for row in plan.rows],
            sampling=[row.sequence.slot for row in plan.rows if row.samples],
            run=run,
        )
        stages.begin(step)
        return PendingStep(
            plan=plan, bucket=bucket, result=partial(stages.finish, step), when_read=partial(stages.settle, step)
        )

    def _last_stage(self) -> LastStage:
        def hidden(bucket: Bucket) -> tuple[tuple[int, ...], np.dtype]:
            shape = self._compiler.hidden(bucket)
            return shape.shape, np.dtype(shape.dtype)

        return LastStage(self._group, hidden=hidden, rows=lambda: self._state.rows)

    def masks(self, pending: PendingStep, constraints: Mapping[int, Constraint]) -> Ints:
        """What the rows of a dispatch whose plan ``waits`` may sample, as `sample` takes it.

        Args:
            constraints: by row; other rows may sample everything.
        """
        return bit_masks(constraints, rows=pending.bucket.rows, vocab_size=self.model.config.vocab_size)

    def sample(self, pending: PendingStep, mask: Ints) -> PendingStep:
        """Starts what a dispatch whose plan ``waits`` has left to do.

        Args:
            mask: from `masks`.
        """
        program, output = self._masked.program(pending.bucket), pending.output
        if self._group.size > 1 and self._stages is None:
            self._group.tell(RunMasked(pending.bucket, Array.of(mask)))
        state, sampled = program(self._head_weights, self._state.without_layers, output.ends, mask)
        self._state = state.with_layers(self._state)
        if not self._on_host:
            sampled.tokens.copy_to_host_async()
        complete = replace(output, tokens=sampled.tokens, logprobs=sampled.logprobs)
        return replace(pending, result=lambda: complete)

    def check_alone(self, what: str) -> None:
        """Raises InvalidRequest if other processes run the model with this one."""
        if self._group.size > 1:
            raise InvalidRequest(f"{what} only where one process runs the model, and here {self._group.size} do")

    def read_pages(self, group: int, pages: Listing[int]) -> ReadInTurn:
        """Starts to read what pages of a group of layers hold when all that was dispatched before has run."""
        assert self._mover is not None
        if self._stages is not None:
            self._stages.finish_begun()  # what has begun was planned before
        mover, shapes, parts = self._mover.result(), self._group.page_shapes(group), []
        for at in range(0, len(pages), MOST_PAGES):
            some = pages[at : at + MOST_PAGES]
            others = self._group.read_pages(group, some)
            own = mover.read(self._state.kv, group, some)
            parts.append(replace(own, others=others, shapes=shapes))
        return ReadInTurn(parts)

    def write_pages(self, group: int, pages: Listing[int], contents: Listing[PageContent]) -> None:
        """Gives pages of a group of layers other content, before all that is dispatched after."""
        assert self._mover is not None
        if self._stages is not None:
            self._stages.finish_begun()
        mover = self._mover.result()
        own = mover.arrays_of(group)
        for at in range(0, len(pages), MOST_PAGES):
            some = pages[at : at + MOST_PAGES]
            values = [np.stack(parts) for parts in zip(*contents[at : at + MOST_PAGES], strict=True)]
            self._group.write_pages(group, some, values[own:])
            self._state = replace(self._state, kv=mover.write(self._state.kv, group, some, values[:own]))

    def watch(self, lost: Callable[[LLMJaxError], None]) -> None:
        """Has ``lost`` called, on another thread, when a process that runs the model with this one has gone."""
        self._group.watch(lost)

    def cause(self, error: Exception) -> Exception:
        """What an error of a step comes from."""
        return self._group.cause(error)

    def close(self, *, wait: bool = True) -> None:
        """Stops compiling, and lets other processes go.

        Args:
            wait: for the compilations that have begun, which hold the weights.
        """
        if self._apart is not None:
            self._apart.close()
        self._threads.close(wait=wait)
        self._masked.close(wait=wait)
        self._group.close()

    @property
    def _slots(self) -> SlotEditor:
        return self._slot_editor.result()

    def _new_row(self, row: Row, sampling: RequestSampling) -> NewRow:
        """The row of a sequence that has got its slot now, which is set up."""
        sequence, count = row.sequence, row.sequence.num_prompt_tokens
        if sampling.uses_slot:
            sampler = self._slots.set_up(
                self._state.sampler,
                sequence.slot,
                sampling,
                prompt=sequence.tokens[:count],
                output=sequence.tokens[count:],
            )
            self._state = replace(self._state, sampler=sampler)
        return _same_row(row, sampling)

    def _before_sampling(self, row: Row, sampling: RequestSampling) -> None:
        sequence = row.sequence
        produced = row.start + row.count - sequence.num_prompt_tokens  # output tokens before the one sampled now
        if sampling.min_tokens and produced == sampling.min_tokens:
            sampler = self._slots.allow_stops(self._state.sampler, sequence.slot, sampling)
            self._state = replace(self._state, sampler=sampler)
        if sampling.bans_vary:
            # The host may not know the last token yet; the ban is conditional on it.
            history = sequence.tokens[: row.start + row.count - 1]
            sampler = self._slots.ban(self._state.sampler, sequence.slot, sampling, history=history)
            self._state = replace(self._state, sampler=sampler)


def _same_row(row: Row, sampling: RequestSampling) -> NewRow:
    """A sequence's row, with as many tokens as the host knows of."""
    return NewRow(slot=row.sequence.slot, length=row.start, words=row_words(row.sequence, sampling))
