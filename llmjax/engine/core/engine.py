"""The engine: requests in, one step after another, outputs out. No threads, no text; see ``frontend`` and ``loop``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from llmjax.config import EngineConfig
from llmjax.constraints.step_matcher import StepMatcher
from llmjax.engine.core.free_run import FreeRun, Refusals, num_allowed
from llmjax.engine.core.kv_cache import KVCache
from llmjax.engine.core.pace import ChunkPace, Pace
from llmjax.engine.core.request import EngineOutput, EngineRequest, Sequence, SequenceTimes, Status, Vectors
from llmjax.engine.core.scheduler import NO_DRAFTS, Row, Scheduler, StepPlan
from llmjax.engine.core.stats import DraftCounts, EngineTotals, HostTime, KVStats, StatLogger, StepStats
from llmjax.engine.device.device_state import NOT_FINITE
from llmjax.engine.device.runner import HostLogprobs, PendingStep, Runner
from llmjax.engine.drafts.speculation import Speculation
from llmjax.engine.loading.memory import KVPlan
from llmjax.engine.loading.model import LoadedModel
from llmjax.engine.profiler import Profiler
from llmjax.engine.programs.step_programs import CompileCounter
from llmjax.engine.sleep import Sleeper
from llmjax.engine.tiers.events import EventBatch
from llmjax.engine.tiers.publisher import EventPublisher
from llmjax.engine.tiers.transfer import PageGiver
from llmjax.errors import Asleep, CompileError, GenerationFailed, InvalidRequest, LLMJaxError
from llmjax.outputs import REPETITION, Logprob, TokenLogprobs
from llmjax.platforms import Platform
from llmjax.sampling.settings import Feature, RequestSampling, request_sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

MESSAGE_SECONDS = 0.01  # that a request may have to wait while nothing but a compiler works


@dataclass
class _StepTimes:
    """When the tokens of a dispatch came, and how many of each row."""

    now: float
    first_tokens: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def take(self, times: SequenceTimes, count: int) -> None:
        """``count`` tokens of a sequence came; those of one dispatch share the time since the one before."""
        self.counts.append(count)
        if not count:
            return
        last = times.last_token
        if last is None:
            times.first_token = last = self.now
            self.first_tokens.append(self.now - times.arrival)
            count -= 1
        times.last_token = self.now
        if count == 1:
            self.inter_token.append(self.now - last)
        elif count:
            self.inter_token += [(self.now - last) / count] * count


class _HostClock:
    """Adds up what the parts of steps take, by their names in `HostTime`."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._started = 0.0

    def start(self) -> None:
        """A part of a step begins."""
        self._started = time.thread_time()

    def lap(self, name: str) -> None:
        """It has ended, and the next one begins."""
        now = time.thread_time()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._started
        self._started = now

    def take(self) -> HostTime:
        """All since the last time."""
        taken, self._laps = self._laps, {}
        return HostTime(**taken)


class Engine:
    """Continuous batching over one model.

    ``step`` dispatches the next step before it reads the one before, so the device never waits for the host; tokens
    come out one step late. While decodes run undisturbed, a dispatch takes several steps. Where drafts of the next
    tokens promise more, the step before is read first, for they follow from its tokens.

    Args:
        config: what was asked for.
        platform: the device.
        model: its weights are there.
        kv_plan: shape of the KV cache.
        kv: page tables, as planned.
        scheduler: over ``kv``.
        runner: the device side.
        pace: steps that a dispatch may take.
        speculation: drafts of next tokens; None: there are none.
        publisher: of changes in the prefix cache, which ``kv`` takes down; None: there is none.
        giver: of pages to other servers; None: none have any.
        compilations: counts what XLA compiles from now on.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        platform: Platform,
        model: LoadedModel,
        kv_plan: KVPlan,
        kv: KVCache,
        scheduler: Scheduler,
        runner: Runner,
        pace: Pace,
        speculation: Speculation | None = None,
        publisher: EventPublisher | None = None,
        giver: PageGiver | None = None,
        compilations: CompileCounter,
    ) -> None:
        self.config = config
        self.platform = platform
        self.model = model
        self.kv_plan = kv_plan
        self.kv = kv
        self.scheduler = scheduler
        self.runner = runner
        self.compilations = compilations
        self.totals = EngineTotals()
        self.loggers: list[StatLogger] = [self.totals]
        self._sequences: dict[int, list[Sequence]] = {}  # unfinished, by request id
        self._sampling: dict[Sequence, RequestSampling] = {}
        self._pending: PendingStep | None = None
        self._arrivals = 0
        self._rng = np.random.default_rng(config.seed)
        self._pace = pace
        self._chunk_pace = ChunkPace()
        self._speculation = speculation
        self._refusals = Refusals()
        self._publisher = publisher
        self._giver = giver
        self.profiler = Profiler(config.profile_dir)
        self._sleeper = Sleeper(config, platform=platform, model=model, runner=runner)
        self._clock = _HostClock()
        self._last_read = 0.0
        self._compilations_seen = 0
        self._frozen = False

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing to read."""
        return self._pending is None and (self._frozen or self.scheduler.idle)

    def kv_stats(self) -> KVStats:
        return self.kv.stats()

    def add(self, request: EngineRequest) -> None:
        """Queues all ``n`` continuations of a request, whose id no other one has.

        Raises:
            InvalidRequest: a sampling field does not fit the model.
            CompileError: it has a grammar, and what samples under masks does not compile.
            Asleep: the engine sleeps.
        """
        if self._sleeper.asleep:
            raise Asleep
        params, held = request.params, False
        if request.grammar is not None:
            if request.matcher is None:
                raise GenerationFailed("the request's grammar could not be compiled")
            self.runner.prepare_masks()
            if held := not self.runner.can_sample_masked():
                logger.info("a request waits for the program that samples under masks")
        # Without a seed of its own a request draws one here, once, so that a preemption does not change its tokens.
        base = params.seed if params.seed is not None else int(self._rng.integers(2**63))
        first = request_sampling(
            params,
            vocab_size=self.model.config.vocab_size,
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
                matcher=None if request.matcher is None else _begun(request.matcher, request),
                # What each token is scored by, or changed by, is worked out where it is sampled.
                jumps=request.matcher is not None and not params.wants_logprobs and not resolved.uses_slot,
                free_run=FreeRun(self._refusals) if self._runs_freely(request, resolved) else None,
            )
            # A window of penalties moves on with what is sampled, which a draft is not yet.
            drafted = not sequence.every_token and request.matcher is None and not resolved.window
            if self._speculation is not None and drafted:
                sequence.drafter = self._speculation.drafter(sequence.tokens)
            sampling[sequence] = resolved
        # Nothing below fails: a request is there as a whole, or not at all.
        self._arrivals += params.n
        self._sampling |= sampling
        self._sequences[request.request_id] = list(sampling)
        for sequence in sampling:
            if self.kv.fetch(sequence) or held:
                self.scheduler.hold(sequence)
            else:
                self.scheduler.add(sequence)

    def _runs_freely(self, request: EngineRequest, sampling: RequestSampling) -> bool:
        """Whether tokens of a request with a grammar may be sampled without masks: no filter looks at the others, and
        nothing that devices keep of a token that is refused would have to be taken back."""
        if request.matcher is None or sampling.features & (Feature.FILTER | Feature.PENALTY):
            return False
        return self.kv.goes_back and not self.config.is_staged

    def abort(self, request_id: int, index: int | None = None) -> list[EngineOutput]:
        """Ends a request (or one continuation of it); returns the last outputs. Unknown ids are ignored: it may have
        just finished."""
        outputs = []
        for sequence in list(self._sequences.get(request_id, ())):
            if index is None or sequence.index == index:
                self._finish(sequence)
                outputs.append(_output(sequence, finish_reason="abort"))
        self._publish()
        return outputs

    def step(self) -> list[EngineOutput]:
        """Dispatches the next step or steps, then reads what was dispatched before; with drafts, the other way round.

        Returns:
            What the dispatch that was read brought; empty if there was none.
        """
        if self._frozen:
            pending, self._pending = self._pending, None
            outputs = [] if pending is None else self._read(pending)
            self._publish()
            return outputs
        if self.scheduler.held:
            ended = self._let_in()
            if ended or (self.scheduler.only_held and self._pending is None):
                return ended
        outputs = []
        self._clock.start()
        drafts, before = self._drafts(), None
        wait = bool(drafts) or any(sequence.waits_to_be_read for sequence in self.scheduler.running)
        if wait and (before := self._pending) is not None:
            self._clock.lap("plan")
            self._pending = None
            outputs = self._read(before)
            self._clock.start()
            drafts = self._drafts()
        max_steps = min(self._pace.steps, self.runner.most_steps(len(self.scheduler.running)))
        plan = self.scheduler.plan(max_steps=max_steps, drafts=drafts, chunk_tokens=self._chunk_pace.tokens)
        self._clock.lap("plan")
        dispatched = None
        if plan.rows:
            self.kv.move_pages(self.runner)
            dispatched = self.runner.dispatch(plan, tables=self.kv.take_changes(), sampling=self._sampling)
            for row in plan.rows:
                if row.samples:
                    row.sequence.in_flight += row.steps
        self._clock.lap("send")
        pending, self._pending = self._pending, dispatched
        if pending is not None:
            outputs += self._read(pending)
        elif dispatched is None and before is None and not self.scheduler.idle:
            raise LLMJaxError(
                f"nothing can be computed for {len(self.scheduler.running)} running and "
                f"{self.scheduler.num_waiting} waiting sequences, and nothing will change that: {self.kv_stats()}"
            )
        outputs += self._sample_masked()
        self._publish()
        self._clock.lap("deliver")
        return outputs

    def _publish(self) -> None:
        """Tells of the changes in the prefix cache."""
        if self._publisher is not None and (events := self.kv.take_events()):
            self._publisher.publish(EventBatch(time.time(), events, self._publisher.rank))

    def _drafts(self) -> Mapping[Sequence, tuple[int, ...]]:
        """Guesses at what follows the tokens that are known, where it pays to verify them."""
        running = self.scheduler.running
        if self._speculation is None or not running or not self.scheduler.only_decodes:
            return NO_DRAFTS
        if any(sequence.matcher is not None for sequence in running):
            return NO_DRAFTS  # masks of several tokens would have to be made one after another
        return self._speculation.drafts(running, most=self.runner.most_drafts(len(running)))

    def _read(self, pending: PendingStep) -> list[EngineOutput]:
        """Waits for a dispatch, and gives its tokens to the sequences."""
        self._clock.start()
        tokens = pending.tokens()
        ready = time.perf_counter()
        self._clock.lap("read")
        times = _StepTimes(time.monotonic())
        outputs = self._process(pending, tokens, times)
        for row, brought in zip(pending.plan.rows, tokens, strict=True) if pending.plan.drafts else ():
            if row.drafts and brought and row.sequence.drafter is not None:
                row.sequence.drafter.verified(right=len(brought) - 1, of=len(row.drafts))
        self._clock.lap("deliver")
        self._record(pending, tokens, times, read_at=ready)
        return outputs

    def _let_in(self) -> list[EngineOutput]:
        """Queues the requests that have got what they waited for: the program that samples under masks, or pages from
        disk.

        Returns:
            The ends of those with a grammar, if there will never be such a program.
        """
        seconds = MESSAGE_SECONDS if self.scheduler.only_held and self._pending is None else 0.0
        ended, ready = [], []
        for sequence in self.scheduler.held:
            try:
                waits = sequence.matcher is not None and not self.runner.can_sample_masked(seconds=seconds)
            except CompileError as error:
                ended.append(self._end(sequence, error))
                continue
            waits = waits or not self.kv.fetched(sequence, seconds=seconds)
            seconds = 0.0
            if not waits:
                ready.append(sequence)
        self.scheduler.let_in(ready)
        return ended

    def _sample_masked(self) -> list[EngineOutput]:
        """Lets a dispatch go on that waits for its masks; every token before is known now.

        Returns:
            The ends of those whose masks take too much.
        """
        pending, outputs = self._pending, []
        if pending is None or not pending.plan.waits:
            return []
        matchers = {}
        for i, row in enumerate(pending.plan.rows):
            sequence = row.sequence
            if not row.samples or sequence.matcher is None or sequence.status is Status.FINISHED:
                continue
            if len(sequence.tokens) > row.start + row.count:
                # The grammar has said what comes. Whatever the row samples is not read.
                row.samples = False
                sequence.in_flight -= row.steps
            else:
                matchers[i] = sequence.matcher
        mask = self.runner.masks(pending, matchers)
        self._pending = self.runner.sample(pending, mask)
        for i, matcher in matchers.items():
            if (run := pending.plan.rows[i].sequence.free_run) is not None:
                run.masked(int(np.bitwise_count(mask[i]).sum()) / self.model.config.vocab_size)
            if matcher.is_error():
                outputs.append(self._end(pending.plan.rows[i].sequence, _no_mask(matcher.get_error())))
        return outputs

    def freeze(self) -> None:
        """Dispatches nothing until it may go on; requests keep their pages, and new ones wait behind them."""
        self._frozen = True

    def go_on(self) -> None:
        """Computes again what is there."""
        self._frozen = False

    def sleep(self, *, discard: bool) -> None:
        """Frees the device's memory until the engine is woken; there may be no requests then. A second time it may free
        more.

        Args:
            discard: the weights are loaded again from their files; otherwise they wait in the host's memory.

        Raises:
            InvalidRequest: requests have not ended, or several processes run the model.
        """
        if self._sequences:
            raise InvalidRequest(f"{len(self._sequences)} requests have not ended: the engine cannot sleep")
        self.runner.check_alone("an engine sleeps")
        while not self.idle:
            self.step()
        self.reset_prefix_cache(offloaded=False)
        self._sleeper.sleep(discard=discard)

    def wake_weights(self) -> None:
        """Brings the weights back; raises CheckpointError if their files have changed."""
        self._sleeper.wake_weights()

    def wake_kv_cache(self) -> None:
        """Makes the KV cache again; requests can be computed once the weights are there, too."""
        self._sleeper.wake_state()

    def reset_prefix_cache(self, *, offloaded: bool = True) -> None:
        """As `KVCache.reset_prefix_cache`; who listens is told."""
        self.kv.reset_prefix_cache(offloaded=offloaded)
        self._publish()

    def keep(self) -> None:
        """Keeps on disk what a later start may find; for the end, and only once."""
        self.kv.close(self.runner)

    def close(self, *, wait: bool = True, lost: bool = False) -> None:
        """Waits for the device and stops the compiler threads.

        Args:
            wait: for the compilations that have begun, too.
            lost: the device waits for a process that has gone, and is not waited for.
        """
        try:
            if self._pending is not None and not lost:
                self._pending.tokens()
            if not lost:
                self.keep()
        finally:
            if self._publisher is not None:
                self._publisher.close()
            if self._giver is not None:
                self._giver.close()
            self.profiler.close()
            self.runner.close(wait=wait)
            self.compilations.close()

    def _process(self, pending: PendingStep, tokens: list[tuple[int, ...]], times: _StepTimes) -> list[EngineOutput]:
        rows = pending.plan.rows
        logprobs = prompt_logprobs = None
        if pending.output.logprobs is not None and any(
            row.samples and row.sequence.request.params.wants_logprobs for row in rows
        ):
            logprobs = HostLogprobs.read(pending.output.logprobs)
        if pending.output.prompt_logprobs is not None and any(row.sequence.wants_prompt_logprobs for row in rows):
            prompt_logprobs = HostLogprobs.read(pending.output.prompt_logprobs)
            self._take_prompt_logprobs(rows, prompt_logprobs)
        vectors = None if pending.output.vectors is None else np.asarray(pending.output.vectors)
        if vectors is not None and any(row.wants_tokens for row in rows):
            _take_token_vectors(rows, np.asarray(pending.output.token_vectors))
        outputs: list[EngineOutput] = []
        for i, (row, brought) in enumerate(zip(rows, tokens, strict=True)):
            sequence = row.sequence
            if row.samples and sequence.status is not Status.FINISHED:
                if sequence.matcher is not None:
                    sequence.matcher.begin_step()
                    brought = self._allowed(sequence, brought, masked=pending.plan.waits)
                sequence.in_flight -= row.steps
                if len(brought) < row.steps and sequence.status is Status.RUNNING:
                    self.kv.fall_short(sequence, row.steps - len(brought))
                if vectors is not None:
                    outputs.append(self._take_vector(sequence, brought, vectors[i]))
                    continue
                times.take(sequence.times, self._take_tokens(sequence, brought, outputs, logprobs, i))
        return outputs

    def _allowed(self, sequence: Sequence, tokens: tuple[int, ...], *, masked: bool) -> tuple[int, ...]:
        """Those of a row's tokens that its grammar lets it keep; the device believes in the others until it is told.

        Args:
            masked: they were sampled under a mask.
        """
        run = sequence.free_run
        if run is None or not tokens or masked:
            return tokens
        assert sequence.matcher is not None
        finite = tokens[:-1] if tokens[-1] == NOT_FINITE else tokens
        count = num_allowed(sequence.matcher, finite)
        if count == len(finite) < len(tokens):
            return tokens  # the failure is behind tokens that hold
        run.ran(allowed=count, of=len(tokens))
        if count < len(tokens):
            sequence.rewound = True
            self._take_back(sequence)
        return tokens[:count]

    def _take_back(self, sequence: Sequence) -> None:
        """What a dispatch in flight samples of a sequence is not read: it goes on from a token that was refused."""
        for row in () if self._pending is None else self._pending.plan.rows:
            if row.sequence is sequence and row.samples:
                row.samples = False
                sequence.in_flight -= row.steps
                if sequence.status is Status.RUNNING:
                    self.kv.fall_short(sequence, row.span)

    def _take_tokens(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        outputs: list[EngineOutput],
        logprobs: HostLogprobs | None,
        row: int,
    ) -> int:
        """Adds the row's tokens to the sequence, and those that its grammar forces then, up to the one that ends it.

        Args:
            outputs: gets one more; one for each token if there are stop strings, so that where one ended is known.

        Returns:
            How many it has added.
        """
        request, known, before = sequence.request, sequence.tokens, len(sequence.tokens)
        params, stops = request.params, request.stop_token_ids
        output: EngineOutput | None = None
        following = chain(tokens, _forced(sequence)) if sequence.jumps and not self._samples(sequence) else tokens
        for step, token in enumerate(following):
            if token == NOT_FINITE:
                outputs.append(self._fail(sequence))
                break
            known.append(token)
            if output is None or params.stop:
                output = _output(sequence)
                outputs.append(output)
            output.new_token_ids.append(token)
            if logprobs is not None and params.wants_logprobs:
                entry = _logprobs_at(logprobs, (step, row), token, params.logprobs or 0, params.logprob_token_ids or ())
                output.new_logprobs = [*(output.new_logprobs or ()), entry]
            if sequence.prompt_logprobs is not None and len(known) == sequence.num_prompt_tokens + 1:
                output.prompt_logprobs = sequence.prompt_logprobs
            matcher = sequence.matcher
            if matcher is not None and not matcher.consume_token(token):
                outputs.append(self._end(sequence, _not_taken(matcher.get_error())))
                break
            if token in stops and len(known) > sequence.num_prompt_tokens + params.min_tokens:
                output.finish_reason = "stop"
                output.stop_reason = token if token in params.stop_token_ids else None
            elif matcher is not None and matcher.is_stopped():
                output.finish_reason = "stop"  # nothing more can follow
            elif len(known) >= sequence.end:
                output.finish_reason = "length"
            elif params.repetition_detection is not None and _repeats(sequence):
                output.finish_reason = REPETITION
            else:
                continue
            self._give(sequence)
            self._finish(sequence)
            break
        return len(known) - before

    def _samples(self, sequence: Sequence) -> bool:
        """Whether a dispatch in flight samples what comes next, and not only once the host has said what it may be."""
        return sequence.in_flight > 0 and self._pending is not None and not self._pending.plan.waits

    def _give(self, sequence: Sequence) -> None:
        """Lets another server have the pages of the prompt, if the request says so."""
        transfer = sequence.request.params.kv_transfer
        if self._giver is not None and transfer is not None and transfer.give is not None and not sequence.index:
            self._giver.give(transfer.give, self.kv.give(sequence, self.runner))

    def _take_vector(self, sequence: Sequence, state: tuple[int, ...], vector: Vectors) -> EngineOutput:
        """Ends a sequence whose text has been read to its end."""
        if state == (NOT_FINITE,):
            return self._fail(sequence)
        self._finish(sequence)
        output = _output(sequence, finish_reason="stop")
        # Copies: a step's arrays would live as long as any of their rows.
        output.vectors = np.concatenate(sequence.vectors) if sequence.vectors else vector.copy()
        sequence.vectors.clear()
        return output

    def _take_prompt_logprobs(self, rows: list[Row], logprobs: HostLogprobs) -> None:
        at = 0
        for row in rows:
            if row.sequence.wants_prompt_logprobs:
                _take_prompt_logprobs(row, logprobs, at)
            at += row.count

    def _fail(self, sequence: Sequence) -> EngineOutput:
        """Ends a sequence whose logits are not finite. Its keys and values may not be either: nobody may find them."""
        self.kv.forget(sequence)
        error = GenerationFailed(
            f"the model's logits are not finite (NaN or infinity) after {len(sequence.tokens)} tokens; weights may be "
            f"damaged, or too large for their dtype"
        )
        return self._end(sequence, error)

    def _end(self, sequence: Sequence, error: LLMJaxError) -> EngineOutput:
        """Ends a sequence by an error."""
        self._finish(sequence)
        output = _output(sequence, finish_reason="error")
        output.error = error
        return output

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.kv.end_fetch(sequence)
        del self._sampling[sequence]
        siblings = self._sequences[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[sequence.request.request_id]

    def _record(
        self, pending: PendingStep, tokens: list[tuple[int, ...]], times: _StepTimes, *, read_at: float
    ) -> None:
        plan, speculation = pending.plan, self._speculation
        compiled = self.compilations.count
        first_admitted = [s for s in plan.admitted if not s.times.num_preemptions]
        seconds = read_at - self._last_read if self._last_read else 0.0
        # A dispatch takes none if every row had ended in the one before.
        steps = max([len(sampled) if row.samples else 1 for row, sampled in zip(plan.rows, tokens, strict=False)])
        if plan.drafts:
            steps = 1
        if plan.waits and plan.decode_only:
            pass  # one step, however long others may take
        elif plan.decode_only and not plan.admitted:
            self._pace.record(steps, seconds)
        else:
            self._pace.restart()
            if seconds and plan.rows[0].start >= plan.rows[0].sequence.num_prompt_tokens:  # so nothing was idle before
                self._chunk_pace.record(plan.num_tokens, seconds)
        if speculation is not None and seconds and steps and (plan.drafts or pending.bucket.decode):
            speculation.record(rows=pending.bucket.rows, seconds=seconds / steps, drafts=plan.drafts)
        prompt_tokens = sum(
            min(r.count, r.sequence.num_prompt_tokens - r.start)
            for r in plan.rows
            if r.start < r.sequence.num_prompt_tokens
        )
        stats = StepStats(
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting,
            kv_usage=self.kv.stats().usage,
            step_tokens=[sum(times.counts)] if plan.drafts else _by_step(times.counts, prompt_tokens, steps),
            num_prompt_tokens=prompt_tokens,
            num_generation_tokens=len(times.first_tokens) + len(times.inter_token),
            prefix_cache_queries=sum(s.num_prompt_tokens for s in first_admitted),
            prefix_cache_hits=sum(s.num_cached_tokens for s in first_admitted),
            num_preempted=plan.num_preempted,
            compilations=compiled - self._compilations_seen,
            host=self._clock.take(),
            drafts=_draft_counts(plan, tokens),
            offload=self.kv.take_offload_counts(),
            step_seconds=seconds,
            time_to_first_tokens=times.first_tokens,
            inter_token_latencies=times.inter_token,
        )
        self._compilations_seen = compiled
        self._last_read = read_at
        for logger in self.loggers:
            logger.record_step(stats)


def _begun(matcher: LLMatcher, request: EngineRequest) -> StepMatcher:
    """The grammar's matcher behind what has been written already.

    Raises:
        InvalidRequest: that does not match.
    """
    found = StepMatcher(matcher.deep_copy())
    if request.written and not found.consume_tokens(request.prompt_token_ids[-request.written :]):
        raise InvalidRequest("the answer cannot go on: its grammar has no such beginning", field="structured_outputs")
    return found


def _forced(sequence: Sequence) -> Iterator[int]:
    """What must come behind the tokens that a step has brought, once these are taken: those that a grammar leaves no
    choice about, as every mask would say."""
    if sequence.jumps and sequence.matcher is not None:
        yield from sequence.matcher.compute_ff_tokens()


def _repeats(sequence: Sequence) -> bool:
    """Whether the output only repeats itself, and may end."""
    params, start = sequence.request.params, sequence.num_prompt_tokens
    assert params.repetition_detection is not None
    enough = len(sequence.tokens) >= start + params.min_tokens
    return enough and params.repetition_detection.repeats(sequence.tokens, start=start)


def _take_token_vectors(rows: list[Row], vectors: Vectors) -> None:
    """Adds the vectors of the rows' tokens to sequences that ask for them; ``vectors``: f32 [T, size]."""
    at = 0  # of the row's first token
    for row in rows:
        sequence = row.sequence
        if row.wants_tokens and sequence.status is not Status.FINISHED:
            if row.start == 0:
                sequence.vectors.clear()  # of before it was preempted
            sequence.vectors.append(vectors[at : at + row.count])
        at += row.count


def _by_step(counts: list[int], prompt_tokens: int, steps: int) -> list[int]:
    """Tokens of each of a dispatch's steps, given those that were sampled of each row."""
    sampled = [sum([count > step for count in counts]) for step in range(steps)]
    return [sampled[0] + prompt_tokens, *sampled[1:]] if sampled else []


def _draft_counts(plan: StepPlan, tokens: list[tuple[int, ...]]) -> DraftCounts:
    if not plan.drafts:
        return DraftCounts()
    accepted = [len(brought) - 1 for row, brought in zip(plan.rows, tokens, strict=True) if row.drafts]
    return DraftCounts(
        num_drafts=len(accepted),
        num_draft_tokens=sum([len(row.drafts) for row in plan.rows]),
        accepted_per_pos=[sum([count > at for count in accepted]) for at in range(plan.drafts)],
    )


def _no_mask(why: str) -> InvalidRequest:
    if why.startswith("NoExtension"):
        return _nothing_allowed()
    message = f"the grammar takes more than a step may: {why.splitlines()[0][:200]}"
    return InvalidRequest(message, field="structured_outputs")


def _not_taken(why: str) -> InvalidRequest:
    return _nothing_allowed() if "satisfy the grammar" in why else _no_mask(why)


def _nothing_allowed() -> InvalidRequest:
    return InvalidRequest(
        "nothing that the grammar allows can be sampled: the vocabulary cannot write it, or bad_words, "
        "allowed_token_ids or min_tokens forbid it",
        field="structured_outputs",
    )


def _output(sequence: Sequence, *, finish_reason: str | None = None) -> EngineOutput:
    return EngineOutput(
        request_id=sequence.request.request_id,
        index=sequence.index,
        times=sequence.times,
        new_token_ids=[],
        num_cached_tokens=sequence.num_cached_tokens,
        finish_reason=finish_reason,
    )


def _logprobs_at(
    logprobs: HostLogprobs, at: int | tuple[int, int], token: int, top: int, scored: Listing[int] = ()
) -> TokenLogprobs:
    """The token's own entry, the ``top`` most likely ones, and those of tokens that are named, which have no rank."""
    found = {token: Logprob(logprob=float(logprobs.logprob[at]), rank=int(logprobs.rank[at]))}
    ids, values = logprobs.top_ids[at][:top].tolist(), logprobs.top_logprobs[at][:top].tolist()
    for rank, (other, value) in enumerate(zip(ids, values, strict=True), start=1):
        if other >= 0:
            found.setdefault(other, Logprob(logprob=value, rank=rank))
    for other, value in zip(scored, logprobs.scored[at].tolist() if scored else (), strict=False):
        found.setdefault(other, Logprob(logprob=value))
    return found


def _take_prompt_logprobs(row: Row, logprobs: HostLogprobs, at: int) -> None:
    """Appends the scores of the prompt tokens that this row predicted; its tokens begin at ``at``."""
    sequence = row.sequence
    if sequence.prompt_logprobs is None:
        sequence.prompt_logprobs = [None]
    top = sequence.request.params.prompt_logprobs or 0
    for offset in range(row.count):
        position = row.start + offset + 1
        # A recomputed chunk brings positions again that are there already.
        if len(sequence.prompt_logprobs) == position < sequence.num_prompt_tokens:
            token = sequence.tokens[position]
            sequence.prompt_logprobs.append(_logprobs_at(logprobs, at + offset, token, top))
