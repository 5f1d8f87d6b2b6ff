"""The step recorder: measures steps that have been read, for the pace of later ones and for the receivers of counts."""

from __future__ import annotations

from collections.abc import Callable

from llmjax.engine.core.interfaces import PendingStep
from llmjax.engine.core.kv_cache import KVCache
from llmjax.engine.core.pace import ChunkPace, EncoderPace, Pace
from llmjax.engine.core.scheduler import Scheduler, StepPlan, names_of
from llmjax.engine.core.stats import DraftCounts, EngineTotals, HostClock, StatLogger, StepStats, TokenTimes


class StepRecorder:
    """Measures steps from one to the next.

    Args:
        kv, scheduler: the engine's, for their counts.
        pace: decode steps that a dispatch may take.
        compilations: the number of programs that have been compiled until now.
        encoder_pace: when parts of the encoder's runs come between steps.

    Attributes:
        chunk_pace: tokens of a step that has both decodes and parts of prompts.
        loggers: receivers of the counts.
    """

    def __init__(
        self,
        kv: KVCache,
        scheduler: Scheduler,
        pace: Pace,
        compilations: Callable[[], int],
        encoder_pace: EncoderPace,
    ) -> None:
        self.clock = HostClock()
        self.totals = EngineTotals()
        self.loggers: list[StatLogger] = [self.totals]
        self.pace = pace
        self.chunk_pace = ChunkPace()
        self._encoder_pace = encoder_pace
        self._kv = kv
        self._scheduler = scheduler
        self._compilations = compilations
        self._compilations_seen = 0
        self._last_read = 0.0

    def record(
        self, pending: PendingStep, tokens: list[tuple[int, ...]], times: TokenTimes, *, read_at: float
    ) -> tuple[float, int]:
        """Notes a step that has been read.

        Args:
            tokens: what it sampled, by row.
            times: when its tokens came.
            read_at: when its results were there, in seconds of time.perf_counter().

        Returns:
            The seconds since the step before, 0 if there was none, and the passes through the model that it took.
        """
        plan = pending.plan
        seconds = read_at - self._last_read if self._last_read else 0.0
        self._last_read = read_at
        # A dispatch takes none if every row had ended in the one before.
        steps = max([len(sampled) if row.samples else 1 for row, sampled in zip(plan.rows, tokens, strict=False)])
        steps = 1 if plan.drafts else steps
        self._learn(plan, steps, seconds)
        stats = self._stats(plan, tokens, times, steps=steps, seconds=seconds)
        for logger in self.loggers:
            logger.record_step(stats)
        return seconds, steps

    def _learn(self, plan: StepPlan, steps: int, seconds: float) -> None:
        decodes = plan.decode_only and not plan.admitted
        self._encoder_pace.record(steps=steps, seconds=seconds, parts=plan.encoder_parts, decodes=decodes)
        if plan.waits and plan.decode_only:
            return  # one step, however long others may take
        if plan.encoder_parts:
            return  # the step began when they had ended
        if decodes:
            self.pace.record(steps, seconds)
            return
        self.pace.restart()
        if seconds and plan.rows[0].start >= plan.rows[0].sequence.num_prompt_tokens:  # the device was not idle before
            self.chunk_pace.record(plan.num_tokens, seconds)

    def _stats(
        self, plan: StepPlan, tokens: list[tuple[int, ...]], times: TokenTimes, *, steps: int, seconds: float
    ) -> StepStats:
        compiled = self._compilations()
        before, self._compilations_seen = self._compilations_seen, compiled
        first_admitted = [s for s in plan.admitted if not s.times.num_preemptions]
        prompt_tokens = sum(
            min(r.count, r.sequence.num_prompt_tokens - r.start)
            for r in plan.rows
            if r.start < r.sequence.num_prompt_tokens
        )
        return StepStats(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            kv_usage=self._kv.stats().usage,
            step_tokens=[sum(times.counts)] if plan.drafts else _by_step(times.counts, prompt_tokens, steps),
            num_prompt_tokens=prompt_tokens,
            num_generation_tokens=len(times.first_tokens) + len(times.inter_token),
            prefix_cache_queries=sum(s.num_prompt_tokens for s in first_admitted),
            prefix_cache_hits=sum(s.num_cached_tokens for s in first_admitted),
            image_queries=plan.image_queries,
            image_hits=max(plan.image_queries - plan.images_asked, 0),
            num_preempted=plan.num_preempted,
            running_adapters=names_of(self._scheduler.running),
            waiting_adapters=names_of(self._scheduler.waiting_heads),
            compilations=compiled - before,
            host=self.clock.take(),
            drafts=_draft_counts(plan, tokens),
            offload=self._kv.tier.take_counts(),
            step_seconds=seconds,
            time_to_first_tokens=times.first_tokens,
            inter_token_latencies=times.inter_token,
        )


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
