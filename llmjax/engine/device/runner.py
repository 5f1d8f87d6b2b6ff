"""The runner: makes commands of planned steps, packs their batches, sends them to all ranks, and reads the results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llmjax.adapters.read import AdapterReader
from llmjax.adapters.reference import Adaptation
from llmjax.arrays import Ints
from llmjax.config import EngineConfig
from llmjax.engine.adapters.store import AdapterStore
from llmjax.engine.core import interfaces
from llmjax.engine.core.layer_states import TableChanges
from llmjax.engine.core.media import EncoderAdapter, Encoding, PromptMedia
from llmjax.engine.core.media_rows import MediaRows
from llmjax.engine.core.request import Sequence
from llmjax.engine.core.scheduler import Row, StepPlan
from llmjax.engine.core.tier import PageContent
from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.commands import (
    Command,
    Edit,
    LoadAdapter,
    ProgramName,
    ReadPages,
    RunMasked,
    RunStep,
    WritePages,
)
from llmjax.engine.device.encoder import EncoderPrograms, EncoderRun, commands_of
from llmjax.engine.device.executor import Executor
from llmjax.engine.device.media import delta_of
from llmjax.engine.device.page_moves import MOST_PAGES, ReadInTurn
from llmjax.engine.device.pending import PendingStep
from llmjax.engine.device.rows import NewRow, row_words
from llmjax.engine.device.slots import SlotEdits, table_edit
from llmjax.engine.programs.cache import Executable
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.masked import MaskedPrograms
from llmjax.engine.programs.process import MASKED, compile_apart
from llmjax.engine.programs.step_programs import StepPrograms
from llmjax.engine.programs.threads import CompileThreads
from llmjax.engine.ranks.alone import Alone
from llmjax.engine.ranks.group import RankZero
from llmjax.engine.ranks.stages import LastStage, OneStage, Stages, Step
from llmjax.errors import CheckpointError, LLMJaxError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.models.vision.packing import bucket as bucket_of_patches
from llmjax.sampling.settings import RequestSampling


class Runner:
    """The device side of the engine, at rank 0.

    Args:
        compiler: knows weights, state and buckets.
        config: the configuration with which the model was loaded.
        group: the ranks that run the model.

    Attributes:
        executor: applies the commands at this rank.
        programs: the compiled steps.
        adapters: those that have been read; None: there are no places for any.
        media: the shape of the media pool; None: the model sees nothing.
    """

    def __init__(self, compiler: StepCompiler, config: EngineConfig, *, group: RankZero | None = None) -> None:
        self.model = compiler.model
        self._group: RankZero = group or Alone()
        self._layouts = compiler.layouts
        self._on_host = compiler.platform.is_cpu  # results are there without being copied
        self._threads = CompileThreads(config.compile_threads or usable_cores())
        self.executor = Executor(compiler, config, group=self._group, threads=self._threads)
        several = LastStage if compiler.is_staged else OneStage
        self._stages: Stages = several(self.executor, self._group)
        state = compiler.state_shapes
        self._slot_edits = SlotEdits(state.sampler.vocab_size)
        self._table_entries = state.rows.page_tables.size
        self._numbers = itertools.count()  # numbers of page reads
        buckets = list(self._layouts)
        kept = [bucket for bucket in buckets if compiler.keeps(bucket)]
        self._apart = compile_apart(compiler, kept=kept)
        apart: Mapping[Any, Future[None]] = {} if self._apart is None else self._apart.programs
        self.programs = StepPrograms(self._compile_step, buckets, threads=self._threads, kept=kept, apart=apart)
        self._masked = MaskedPrograms(  # after what all requests need
            compiler, self._compile_masked, threads=self._threads, kept=apart.get(MASKED)
        )

        encoder, self.adapters = self.model.encoder, None
        of_encoder = None if encoder is None else encoder.adapters
        if self.model.adapters is not None:
            stacks = self.model.adapters
            reader = AdapterReader(
                self.model.checkpoint,
                self.model.config,
                stacks.whole_shapes,
                stacks.layout.rank,
                {} if of_encoder is None else of_encoder.whole_shapes,
            )
            self.adapters = AdapterStore(reader, stacks, most=config.most_cpu_loras, of_encoder=of_encoder)
        self.media = compiler.media
        self._encoders: EncoderPrograms | None = None
        self._encoder_parts = compiler.encoder_parts
        if encoder is not None:
            self._encoders = EncoderPrograms(
                encoder.graph.spec, parts=compiler.encoder_parts, build=self._compile_encoder
            )

    def wait_ready(self) -> None:
        """Returns when any request without a grammar can be computed without waiting for the compiler.

        Raises:
            CompileError: no request can.
        """
        self.programs.wait_first()
        self.executor.wait_ready()

    def warm_up(self) -> None:
        """Waits until everything that requests may need is compiled; raises as `wait_ready`."""
        self.wait_ready()
        self.programs.wait_all()
        self._masked.wait_all()

    def most_steps(self, rows: int) -> int:
        """Decode steps that a dispatch of this many rows may take now."""
        return self.programs.most_steps(rows)

    def most_drafts(self, rows: int) -> int:
        """Drafts of its next tokens that each of this many rows may have now."""
        return self.programs.most_drafts(rows)

    def prepare_masks(self) -> None:
        """Compiles what masked steps need, if that has not begun."""
        self._masked.prepare()

    def can_sample_masked(self, *, seconds: float = 0.0) -> bool:
        """Whether steps can be sampled under masks.

        Args:
            seconds: how long to wait for it.

        Raises:
            CompileError: they never can.
        """
        return self._masked.can_sample(seconds=seconds)

    def can_encode(self, media: PromptMedia, adaptation: Adaptation | None, *, seconds: float = 0.0) -> bool:
        """Whether the images of a prompt can be encoded; what is missing for that is compiled.

        Args:
            adaptation: the adapters of its request; None: there are none.
            seconds: how long to wait for it.

        Raises:
            CompileError: they never can.
        """
        assert self._encoders is not None, "the front lets no image pass"
        adapted: bool | None = False
        if adaptation is not None and self.adapters is not None:
            with suppress(CheckpointError):  # the choice of adapters for slots gets it, too
                adapted = self.adapters.changes_encoder(adaptation, seconds=seconds)
        return adapted is not None and self._encoders.ready(media, adapted=adapted, seconds=seconds)

    def encoder_run(self, encodings: Listing[Encoding]) -> EncoderRun:
        """A run of the encoder on the first of some images: on as many as go together."""
        encoder = self.model.encoder
        assert encoder is not None and self.media is not None and self._encoders is not None
        spec, own = encoder.graph.spec, encodings[: self._encoders.together(encodings)]
        patches = bucket_of_patches(spec, sum(len(encoding.image.patches) for encoding in own))
        commands = commands_of(spec, own, parts=self._encoder_parts(patches), nowhere=self.media.num_rows)
        return EncoderRun(own, commands, self._stages.apply)

    def can_load(self, adaptation: Adaptation, *, seconds: float = 0.0) -> bool:
        """Whether adapters are ready to be loaded, after waiting up to ``seconds`` for it. If they are not, they are
        being read from now on.

        Raises:
            CheckpointError: they cannot be read, or do not fit the model or the settings.
        """
        assert self.adapters is not None, "the front lets no adapter pass"
        return self.adapters.ready(adaptation, seconds=seconds)

    def of_encoder(self, adaptation: Adaptation) -> EncoderAdapter | None:
        """What adapters that are ready to be loaded change of the encoder of images; None: nothing."""
        assert self.adapters is not None
        values = self.adapters.of_encoder(adaptation)
        return None if values is None else EncoderAdapter(adaptation.digest, values)

    def load_adapter(self, slot: int, adaptation: Adaptation) -> None:
        """Writes adapters into a slot, 1 to ``max_loras``, after all earlier dispatches have run and before all later
        ones; raises as `can_load`."""
        assert self.adapters is not None
        self._stages.apply(LoadAdapter(slot, self.adapters.values(adaptation)))

    def dispatch(
        self,
        plan: StepPlan,
        *,
        tables: TableChanges,
        sampling: Mapping[Sequence, RequestSampling],
        media: MediaRows,
    ) -> PendingStep:
        """Starts a step and returns without waiting for it.

        Args:
            tables: what has changed in the page tables since the dispatch before.
            sampling: resolved sampling of the plan's sequences.
            media: where the rows of the plan's images are.
        """
        new = self._new_rows(plan, sampling)
        bucket = self.programs.pick(plan, usable=self._masked.ready if plan.waits else None).bucket
        layout = self._layouts[bucket]
        *before, last = tables.chunks(layout.room)
        for chunk in before:
            self._stages.apply(table_edit(chunk, size=self._table_entries))
        step = Step(
            RunStep(bucket, layout.pack(plan, new=new, tables=last, media=media)),
            slots=[row.sequence.slot for row in plan.rows],
            sampling=[row.sequence.slot for row in plan.rows if row.samples],
            copies=not self._on_host and not plan.waits,
        )
        self._stages.begin(step)
        return PendingStep(plan, bucket, partial(self._stages.finish, step), partial(self._stages.settle, step))

    def sample(self, pending: interfaces.PendingStep, mask: Ints) -> PendingStep:
        """Starts what a dispatch of this runner, whose plan ``waits``, has left to do.

        Args:
            mask: bits of the tokens that its rows may sample: i32 [rows, words].
        """
        assert isinstance(pending, PendingStep)
        output = pending.output
        sampled = self._stages.apply_to_samplers(RunMasked(pending.bucket, mask))
        if not self._on_host:
            sampled.tokens.copy_to_host_async()
        complete = replace(output, tokens=sampled.tokens, logprobs=sampled.logprobs)
        return replace(pending, result=lambda: complete)

    def apply(self, command: Command) -> None:
        """Has every rank apply a command, after every step that has begun."""
        self._stages.apply(command)

    def read_pages(self, group: int, pages: Listing[int]) -> ReadInTurn:
        """Starts to read pages of a group of layers, with the content after all earlier dispatches have run."""
        self._stages.finish_begun()  # it was planned before
        parts = []
        for at in range(0, len(pages), MOST_PAGES):
            command = ReadPages(next(self._numbers), group, list(pages[at : at + MOST_PAGES]))
            others = self._group.gather(command)
            parts.append(replace(self.executor.apply(command), others=others))
        return ReadInTurn(parts)

    def write_pages(self, group: int, pages: Listing[int], contents: Listing[PageContent]) -> None:
        """Writes pages of a group of layers before all later dispatches run."""
        self._stages.finish_begun()
        own = self.executor.page_arrays(group)
        for at in range(0, len(pages), MOST_PAGES):
            some = list(pages[at : at + MOST_PAGES])
            arrays = [np.stack(parts) for parts in zip(*contents[at : at + MOST_PAGES], strict=True)]
            self._group.scatter(WritePages(group, some, arrays[own:]))
            self.executor.apply(WritePages(group, some, arrays[:own]))

    def watch(self, lost: Callable[[LLMJaxError], None]) -> None:
        """Has ``lost`` called, on another thread, when a process that runs the model with this one has gone."""
        self._group.watch(lost)

    def cause(self, error: Exception) -> Exception:
        """The cause of a step's error: the loss of a rank, if one has gone, else the error itself."""
        return self._group.cause(error)

    def close(self, *, wait: bool = True) -> None:
        """Stops compiling, and lets other processes end.

        Args:
            wait: whether to wait for the compilations that have begun, which hold the weights.
        """
        if self._apart is not None:
            self._apart.close()
        self._threads.close(wait=wait)
        self._masked.close(wait=wait)
        if self._encoders is not None:
            self._encoders.close(wait=wait)
        if self.adapters is not None:
            self.adapters.close(wait=wait)
        self._group.close()

    def _compile_step(self, bucket: Bucket) -> Executable:
        program = ProgramName.step(bucket)
        return self._group.everywhere(program, partial(self.executor.compile, program))

    def _compile_masked(self, bucket: Bucket) -> Executable:
        program = ProgramName.masked(bucket)
        return self._stages.samplers.everywhere(program, partial(self.executor.compile, program))

    def _compile_encoder(self, bucket: Bucket) -> Executable:
        program = ProgramName("encode", bucket)
        return self._group.everywhere(program, partial(self.executor.compile, program))

    def _new_rows(self, plan: StepPlan, sampling: Mapping[Sequence, RequestSampling]) -> list[NewRow]:
        """The rows that are new to the device; prepares the slots of sequences for sampling."""
        admitted = set(plan.admitted)
        new = [self._set_up(row, sampling[row.sequence]) for row in plan.rows if row.sequence in admitted]
        for row in plan.rows:
            constraint = row.sequence.constraint
            if constraint is not None and constraint.rewound:
                constraint.rewound = False
                if row.sequence not in admitted:
                    new.append(_row(row, sampling[row.sequence]))
        for row in plan.rows:
            if row.sequence.between and row.samples:
                self._edit(self._slot_edits.before_sampling(row, sampling[row.sequence]))
        return new

    def _set_up(self, row: Row, sampling: RequestSampling) -> NewRow:
        """The row of a sequence that has just got its slot, which is set up."""
        if sampling.uses_slot:
            self._edit(self._slot_edits.set_up(row.sequence, sampling))
        return _row(row, sampling)

    def _edit(self, edits: Iterable[Edit]) -> None:
        for edit in edits:
            self._stages.apply_to_samplers(edit)


def _row(row: Row, sampling: RequestSampling) -> NewRow:
    """A sequence's row, with as many tokens as the host knows."""
    words = row_words(row.sequence, sampling)
    return NewRow(slot=row.sequence.slot, length=row.start, words=words, delta=delta_of(row))
