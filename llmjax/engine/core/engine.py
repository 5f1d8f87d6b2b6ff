"""The engine: requests in, one step after another, outputs out. No threads, no text; see ``frontend`` and ``loop``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from llmjax.adapters.reference import AdapterReference
from llmjax.engine.constraint import Constraint
from llmjax.engine.core.encoder_queue import EncoderQueue
from llmjax.engine.core.interfaces import PendingStep, Runner, Speculation
from llmjax.engine.core.kv_cache import KVCache
from llmjax.engine.core.outputs import OutputProcessor, output_of
from llmjax.engine.core.pace import EncoderPace, Pace
from llmjax.engine.core.recorder import StepRecorder
from llmjax.engine.core.request import EngineOutput, EngineRequest, Sequence, SequenceTimes, Status
from llmjax.engine.core.scheduler import NO_DRAFTS, Scheduler, StepPlan
from llmjax.engine.core.stats import EngineTotals, KVStats, StatLogger, TokenTimes
from llmjax.engine.free_run import FreeRun, Refusals
from llmjax.errors import CompileError, GenerationFailed, InvalidRequest, LLMJaxError
from llmjax.sampling.masks import bit_masks
from llmjax.sampling.settings import Feature, RequestSampling, request_sampling

logger = logging.getLogger(__name__)

NO_ADAPTERS = "this engine has no room for adapters (--enable-lora)"
MESSAGE_SECONDS = 0.01  # how long a request may wait while only a compiler works


class Engine:
    """Continuous batching over one model.

    ``step`` dispatches the next step before it reads the one before, so the device never waits for the host; tokens
    come out one step late. While decodes run undisturbed, a dispatch takes several steps. Where drafts of the next
    tokens promise more, the step before is read first, because drafts follow from its tokens.

    Args:
        kv: page tables, as planned.
        scheduler: plans steps over ``kv``.
        runner: computes steps.
        pace: steps that a dispatch may take.
        encoder_pace: when parts of the encoder's runs come between steps.
        vocab_size: number of the model's logits.
        seed: the seed for requests that have none.
        rewinds: whether tokens that were sampled can be taken back.
        speculation: drafts of next tokens; None: there are none.
        compilations: the number of programs that have been compiled until now.
    """

    def __init__(
        self,
        *,
        kv: KVCache,
        scheduler: Scheduler,
        runner: Runner,
        pace: Pace,
        vocab_size: int,
        seed: int | None,
        rewinds: bool = True,
        speculation: Speculation | None = None,
        compilations: Callable[[], int] = lambda: 0,
        encoder_pace: EncoderPace | None = None,
    ) -> None:
        self.kv = kv
        self.scheduler = scheduler
        self.runner = runner
        self._sequences: dict[int, list[Sequence]] = {}  # unfinished, by request id
        self._sampling: dict[Sequence, RequestSampling] = {}
        self._pending: PendingStep | None = None
        self._arrivals = 0
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._rewinds = rewinds
        self._speculation = speculation
        self._refusals = Refusals()
        self._processor = OutputProcessor(kv, finish=self._finish, give=partial(kv.give, device=runner))
        encoder_pace = encoder_pace or EncoderPace()
        self._recorder = StepRecorder(kv, scheduler, pace, compilations, encoder_pace)
        self._encoder = EncoderQueue(runner, encoder_pace)
        self._frozen = False

    @property
    def totals(self) -> EngineTotals:
        """Sums since the start."""
        return self._recorder.totals

    @property
    def loggers(self) -> list[StatLogger]:
        """The receivers of each step's counts; more may be added."""
        return self._recorder.loggers

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to read."""
        return self._pending is None and (self._frozen or self.scheduler.idle)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._sequences)

    def kv_stats(self) -> KVStats:
        """Pages by state."""
        return self.kv.stats()

    def add(self, request: EngineRequest) -> None:
        """Queues all ``n`` continuations of a request, whose id must be new.

        Raises:
            InvalidRequest: a sampling field does not fit the model, or there are no adapters.
            CompileError: its constraint needs masks, and the program that samples under them does not compile.
        """
        params = request.params
        if request.grammar is not None and request.matcher is None:
            raise GenerationFailed("the request's grammar could not be compiled")
        if request.adaptation is not None and self.scheduler.adapters is None:
            raise InvalidRequest(NO_ADAPTERS, field="model")
        # Without a seed of its own a request draws one here, once, so that a preemption does not change its tokens.
        base = params.seed if params.seed is not None else int(self._rng.integers(2**63))
        first = request_sampling(
            params,
            vocab_size=self._vocab_size,
            seed=base,
            eos_ids=request.stop_token_ids,
            bad_words=request.bad_words_token_ids,
        )
        sampling: dict[Sequence, RequestSampling] = {}
        for index in range(params.n):
            seed = (base + index) % 2**64
            resolved = first.with_seed(seed)
            sequence = Sequence(
                request=request,
                index=index,
                order=self._arrivals + index,
                seed=seed,
                tokens=list(request.prompt_token_ids),
                times=SequenceTimes(arrival=request.arrival_time),
                every_token=resolved.bans_vary,
                constraint=self._constraint(request, resolved),
            )
            # A window of penalties moves on with what is sampled, which a draft is not yet.
            drafted = not sequence.every_token and not sequence.may_need_masks and not resolved.window
            if self._speculation is not None and drafted:
                sequence.drafter = self._speculation.drafter(sequence.tokens)
            sampling[sequence] = resolved
        held = False
        if any(sequence.may_need_masks for sequence in sampling):
            self.runner.prepare_masks()
            if held := not self.runner.can_sample_masked():
                logger.info("a request waits for the program that samples under masks")
        if request.media is not None and not self.runner.can_encode(request.media, request.adaptation):
            held = True
            logger.info("a request waits for the program that encodes its images")
        # Nothing below fails: a request is there as a whole, or not at all.
        self._arrivals += params.n
        self._sampling |= sampling
        self._sequences[request.request_id] = list(sampling)
        for sequence in sampling:
            if self.kv.fetch(sequence) or held:
                self.scheduler.hold(sequence)
            else:
                self.scheduler.add(sequence)

    def _constraint(self, request: EngineRequest, sampling: RequestSampling) -> Constraint | None:
        """What a new sequence has to keep to; None: nothing."""
        if request.matcher is None and request.thinking is None:
            return None
        return Constraint(
            request.matcher,
            budget=request.thinking,
            # A token's scores and the effects of penalties are computed where it is sampled.
            jumps=not request.params.wants_logprobs and not sampling.uses_slot,
            free_run=FreeRun(self._refusals) if self._runs_freely(sampling) else None,
        )

    def _runs_freely(self, sampling: RequestSampling) -> bool:
        """Whether tokens of a request with a grammar may be sampled without masks: no filter depends on the other
        tokens, and the device keeps nothing of a refused token that would have to be undone."""
        return self._rewinds and self.kv.goes_back and not sampling.features & (Feature.FILTER | Feature.PENALTY)

    def abort(self, request_id: int, index: int | None = None) -> list[EngineOutput]:
        """Ends a request (or one continuation of it); returns the last outputs. Unknown ids are ignored: it may have
        just finished."""
        outputs = []
        for sequence in list(self._sequences.get(request_id, ())):
            if index is None or sequence.index == index:
                self._finish(sequence)
                outputs.append(output_of(sequence, finish_reason="abort"))
        self.kv.listener.publish()
        return outputs

    def step(self) -> list[EngineOutput]:
        """Dispatches the next step or steps, then reads what was dispatched before; with drafts, the other way round.

        Returns:
            What the dispatch that was read brought; empty if there was none.
        """
        if self._frozen:
            outputs = self._read_pending()
            self.kv.listener.publish()
            return outputs
        if self.scheduler.held:
            ended = self._let_in()
            if ended or (self.scheduler.only_held and self._pending is None and not self._encoder.busy):
                return ended
        clock, waiting = self._recorder.clock, self._pending is not None
        clock.start()
        plan, outputs = self._plan()
        clock.lap("plan")
        outputs += self._end_unreadable()
        encoding = self._encode(plan)
        dispatched = self._execute(plan)
        clock.lap("send")
        pending, self._pending = self._pending, dispatched
        if pending is not None:
            outputs += self._read(pending)
        elif dispatched is None and not (waiting or encoding or self.scheduler.idle) and not self._wait_for_adapters():
            raise LLMJaxError(
                f"nothing can be computed for {len(self.scheduler.running)} running and "
                f"{self.scheduler.num_waiting} waiting sequences, and nothing will change that: {self.kv_stats()}"
            )
        outputs += self._sample_masked()
        self.kv.listener.publish()
        clock.lap("deliver")
        return outputs

    def _plan(self) -> tuple[StepPlan, list[EngineOutput]]:
        """The next dispatch, and the outputs of the one before, if it had to be read first."""
        running, outputs = self.scheduler.running, list[EngineOutput]()
        drafts = self._drafts()
        if self._pending is not None and (drafts or any(sequence.waits_to_be_read for sequence in running)):
            self._recorder.clock.lap("plan")
            outputs = self._read_pending()
            self._recorder.clock.start()
            drafts = self._drafts()
        max_steps = min(self._recorder.pace.steps, self.runner.most_steps(len(running)))
        chunk_tokens = self._recorder.chunk_pace.tokens
        return self.scheduler.plan(max_steps=max_steps, drafts=drafts, chunk_tokens=chunk_tokens), outputs

    def _encode(self, plan: StepPlan) -> bool:
        """Starts what the encoder computes before the planned dispatch; returns whether there was anything."""
        self._encoder.add(plan.encodings)
        if not self._encoder.busy:
            return False
        streams = self.scheduler.streams and (bool(plan.rows) or self._pending is not None)
        self.scheduler.media.arrived(self._encoder.advance(beside_streams=streams))
        return True

    def _execute(self, plan: StepPlan) -> PendingStep | None:
        """Starts the planned dispatch; None: nothing is planned."""
        if not plan.rows:
            return None
        self.kv.tier.move(self.runner)
        if (adapters := self.scheduler.adapters) is not None:
            adapters.dispatch(row.sequence.adapter_slot for row in plan.rows)
        plan = replace(plan, encoder_parts=self._encoder.take_parts()) if self.scheduler.media.num_rows else plan
        dispatched = self.runner.dispatch(
            plan, tables=self.kv.take_changes(), sampling=self._sampling, media=self.scheduler.media
        )
        for row in plan.rows:
            if row.samples:
                row.sequence.in_flight += row.steps
        return dispatched

    def _drafts(self) -> Mapping[Sequence, tuple[int, ...]]:
        """Drafts of what follows the known tokens, where it pays to verify them."""
        running = self.scheduler.running
        if self._speculation is None or not running or not self.scheduler.only_decodes:
            return NO_DRAFTS
        if any(sequence.may_need_masks for sequence in running):
            return NO_DRAFTS  # masks of several tokens would have to be made one after another
        if any(sequence.num_computed < sequence.media_end for sequence in running):
            return NO_DRAFTS  # the token to compute is of an image
        return self._speculation.drafts(running, most=self.runner.most_drafts(len(running)))

    def _read_pending(self) -> list[EngineOutput]:
        """Reads the dispatch in flight, if there is one; then there is none."""
        pending, self._pending = self._pending, None
        return [] if pending is None else self._read(pending)

    def _read(self, pending: PendingStep) -> list[EngineOutput]:
        """Waits for a dispatch, and gives its tokens to the sequences."""
        clock, plan = self._recorder.clock, pending.plan
        clock.start()
        tokens = pending.tokens()
        ready = time.perf_counter()
        if self.scheduler.adapters is not None:
            self.scheduler.adapters.ended()
        clock.lap("read")
        times = TokenTimes(time.monotonic())
        following = None if self._pending is None else self._pending.plan
        outputs = self._processor.process(pending, tokens, times, following=following)
        for row, brought in zip(plan.rows, tokens, strict=True) if plan.drafts else ():
            if row.drafts and brought and row.sequence.drafter is not None:
                row.sequence.drafter.verified(right=len(brought) - 1, of=len(row.drafts))
        clock.lap("deliver")
        seconds, steps = self._recorder.record(pending, tokens, times, read_at=ready)
        if self._speculation is not None and seconds and steps and (plan.drafts or pending.bucket.decode):
            self._speculation.record(rows=pending.bucket.rows, seconds=seconds / steps, drafts=plan.drafts)
        return outputs

    def _let_in(self) -> list[EngineOutput]:
        """Queues the requests that no longer have to wait for the program that samples under masks, for pages from
        disk, or for images.

        Returns:
            Outputs that end those with a grammar, if there will never be such a program.
        """
        seconds = MESSAGE_SECONDS if self.scheduler.only_held and self._pending is None else 0.0
        ended, ready = [], []
        for sequence in self.scheduler.held:
            try:
                waits = sequence.may_need_masks and not self.runner.can_sample_masked(seconds=seconds)
                media, own = sequence.request.media, sequence.request.adaptation
                waits = waits or (media is not None and not self.runner.can_encode(media, own, seconds=seconds))
            except CompileError as error:
                ended.append(self._processor.end(sequence, error))
                continue
            waits = waits or self.scheduler.media.awaits(sequence)
            waits = waits or not self.kv.tier.fetched(sequence, seconds=seconds)
            seconds = 0.0
            if not waits:
                ready.append(sequence)
        self.scheduler.let_in(ready)
        return ended

    def _end_unreadable(self) -> list[EngineOutput]:
        """Ends the sequences whose adapters cannot be read."""
        failed = {} if self.scheduler.adapters is None else self.scheduler.adapters.take_failed()
        return [
            self._processor.end(sequence, error)
            for digest, error in failed.items()
            for sequence in self.scheduler.waiting_for(digest)
        ]

    def _wait_for_adapters(self) -> bool:
        """Whether sequences wait for adapters that are being read; waits for them a moment."""
        return self.scheduler.adapters is not None and self.scheduler.adapters.wait(MESSAGE_SECONDS)

    def _sample_masked(self) -> list[EngineOutput]:
        """Samples a dispatch that waits for its masks; every token before is known now.

        Returns:
            Outputs that end the sequences whose masks take too much to make.
        """
        pending, outputs = self._pending, []
        if pending is None or not pending.plan.waits:
            return []
        constraints = {}
        for i, row in enumerate(pending.plan.rows):
            sequence = row.sequence
            if not row.samples or sequence.constraint is None or sequence.status is Status.FINISHED:
                continue
            if len(sequence.tokens) > row.start + row.count:
                # The next token is forced. Whatever the row samples is not read.
                row.samples = False
                sequence.in_flight -= row.steps
            else:
                constraints[i] = sequence.constraint
        mask = bit_masks(constraints, rows=pending.bucket.rows, vocab_size=self._vocab_size)
        self._pending = self.runner.sample(pending, mask)
        for i, constraint in constraints.items():
            constraint.masked(mask[i], vocab_size=self._vocab_size)
            if constraint.error is not None:
                outputs.append(self._processor.refuse(pending.plan.rows[i].sequence))
        return outputs

    def read_adapter(self, adapter: AdapterReference) -> None:
        """Reads an adapter into host memory, so that requests for it need not wait. Any thread may call this.

        Raises:
            InvalidRequest: there are no adapters here.
            LLMJaxError: it cannot be read, or does not fit the model or the settings.
        """
        if self.scheduler.adapters is None:
            raise InvalidRequest(NO_ADAPTERS, field="model")
        self.scheduler.adapters.read(adapter)

    def freeze(self) -> None:
        """Dispatches nothing until ``go_on`` is called; requests keep their pages, and new ones wait after them."""
        self._frozen = True

    def go_on(self) -> None:
        """Dispatches steps again."""
        self._frozen = False

    def reset_prefix_cache(self, *, offloaded: bool = True) -> None:
        """Empties the prefix cache, as `KVCache.reset_prefix_cache` does, and publishes the change."""
        self.kv.reset_prefix_cache(offloaded=offloaded)
        if not self._sequences:
            self.scheduler.media.abandon(self._encoder.abandon())
        self.scheduler.media.forget()
        self.kv.listener.publish()

    def keep(self) -> None:
        """Keeps on disk what a later start may find; called once, at the end."""
        self.kv.keep(self.runner)

    def wait(self) -> None:
        """Waits for the dispatch in flight, and drops its tokens."""
        if self._pending is not None:
            self._pending.tokens()

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.kv.tier.end_fetch(sequence)
        del self._sampling[sequence]
        siblings = self._sequences[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[sequence.request.request_id]
