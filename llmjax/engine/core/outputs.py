"""The output processor: gives a step's results to its sequences, and says which of them have ended, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from llmjax.engine.constraint import Constraint
from llmjax.engine.core.interfaces import NOT_FINITE, Logprobs, PendingStep
from llmjax.engine.core.kv_cache import KVCache
from llmjax.engine.core.request import EngineOutput, Sequence, Status, Vectors
from llmjax.engine.core.scheduler import Row, StepPlan
from llmjax.engine.core.stats import TokenTimes
from llmjax.errors import GenerationFailed, LLMJaxError
from llmjax.outputs import REPETITION, Logprob, TokenLogprobs


@dataclass(frozen=True)
class HostLogprobs:
    """`Logprobs` on the host, with the same shapes."""

    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    scored: npt.NDArray[np.float32]

    @classmethod
    def read(cls, logprobs: Logprobs) -> HostLogprobs:
        """Waits for the device and copies."""
        parts = (logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs, logprobs.scored)
        return cls(*(np.asarray(part) for part in parts))

    def entry(self, at: int | tuple[int, int], token: int, *, top: int, scored: Listing[int] = ()) -> TokenLogprobs:
        """The scores of one place: the token's own, those of the likeliest, and those of tokens that were named.

        Args:
            at: the place, an index of the first arrays.
            token: the token that stands there.
            top: how many of the likeliest tokens are wanted.
            scored: the ids that were named; their entries have no rank.
        """
        entries = {token: Logprob(logprob=float(self.logprob[at]), rank=int(self.rank[at]))}
        ids, values = self.top_ids[at][:top].tolist(), self.top_logprobs[at][:top].tolist()
        for rank, (other, value) in enumerate(zip(ids, values, strict=True), start=1):
            if other >= 0:
                entries.setdefault(other, Logprob(logprob=value, rank=rank))
        for other, value in zip(scored, self.scored[at].tolist() if scored else (), strict=False):
            entries.setdefault(other, Logprob(logprob=value))
        return entries


class OutputProcessor:
    """Turns the results of steps into outputs.

    Args:
        kv: the pages of the sequences.
        finish: removes a sequence that has ended.
        give: lets another server have the pages of a sequence's prompt, if its request says so.
    """

    def __init__(self, kv: KVCache, *, finish: Callable[[Sequence], None], give: Callable[[Sequence], None]) -> None:
        self._kv = kv
        self._finish = finish
        self._give = give

    def process(
        self, pending: PendingStep, tokens: list[tuple[int, ...]], times: TokenTimes, *, following: StepPlan | None
    ) -> list[EngineOutput]:
        """Gives a step's results to the sequences that have not ended meanwhile.

        Args:
            pending: the step.
            tokens: what it sampled, by row.
            times: is told how many tokens each sequence got.
            following: the plan of the dispatch in flight after it; None: nothing is in flight.
        """
        rows, result = pending.plan.rows, pending.output
        logprobs = None
        if result.logprobs is not None and any(
            row.samples and row.sequence.request.params.wants_logprobs for row in rows
        ):
            logprobs = HostLogprobs.read(result.logprobs)
        if result.prompt_logprobs is not None and any(row.sequence.wants_prompt_logprobs for row in rows):
            _take_prompt_logprobs(rows, HostLogprobs.read(result.prompt_logprobs))
        vectors = None if result.vectors is None else np.asarray(result.vectors)
        if vectors is not None and any(row.wants_tokens for row in rows):
            _take_token_vectors(rows, np.asarray(result.token_vectors))
        outputs: list[EngineOutput] = []
        for i, (row, brought) in enumerate(zip(rows, tokens, strict=True)):
            sequence = row.sequence
            if not row.samples or sequence.status is Status.FINISHED:
                continue
            if (constraint := sequence.constraint) is not None:
                constraint.begin_step()
                if constraint.runs and not pending.plan.waits:
                    brought = self._allowed(sequence, constraint, brought, following)
            sequence.in_flight -= row.steps
            if len(brought) < row.steps and sequence.status is Status.RUNNING:
                self._kv.fall_short(sequence, row.steps - len(brought))
            if vectors is not None:
                outputs.append(self._take_vector(sequence, brought, vectors[i]))
                continue
            if constraint is not None and constraint.begins and brought != (NOT_FINITE,):
                brought = ()
            before = len(sequence.tokens)
            jumps = constraint is not None and constraint.jumps and not _is_sampled(sequence, following)
            more = chain(brought, _forced(sequence)) if jumps else brought
            self._take_tokens(sequence, more, outputs, logprobs, i)
            times.take(sequence.times, len(sequence.tokens) - before)
            if constraint is not None and constraint.over:
                sequence.constraint = None
        return outputs

    def end(self, sequence: Sequence, error: LLMJaxError) -> EngineOutput:
        """Ends a sequence by an error."""
        self._finish(sequence)
        output = output_of(sequence, finish_reason="error")
        output.error = error
        return output

    def fail(self, sequence: Sequence) -> EngineOutput:
        """Ends a sequence whose logits are not finite. Its KV entries may not be either, so they are not cached."""
        self._kv.forget(sequence)
        error = GenerationFailed(
            f"the model's logits are not finite (NaN or infinity) after {len(sequence.tokens)} tokens; weights may be "
            f"damaged, or too large for their dtype"
        )
        return self.end(sequence, error)

    def refuse(self, sequence: Sequence) -> EngineOutput:
        """Ends a sequence whose constraint allows no further token."""
        assert sequence.constraint is not None and sequence.constraint.error is not None
        return self.end(sequence, sequence.constraint.error)

    def _allowed(
        self, sequence: Sequence, constraint: Constraint, tokens: tuple[int, ...], following: StepPlan | None
    ) -> tuple[int, ...]:
        """The tokens that a sequence keeps of those that were sampled without masks."""
        finite = tokens[:-1] if tokens[-1:] == (NOT_FINITE,) else tokens
        if not finite:
            return tokens
        count = constraint.rewind(finite)
        if count == len(finite):
            return tokens  # includes the failure, if it comes after allowed tokens
        self._take_back(sequence, following)
        return tokens[:count]

    def _take_back(self, sequence: Sequence, following: StepPlan | None) -> None:
        """Drops what a dispatch in flight samples for a sequence, because it continues a token that was refused."""
        for row in () if following is None else following.rows:
            if row.sequence is sequence and row.samples:
                row.samples = False
                sequence.in_flight -= row.steps
                if sequence.status is Status.RUNNING:
                    self._kv.fall_short(sequence, row.span)

    def _take_tokens(
        self,
        sequence: Sequence,
        tokens: Iterator[int] | tuple[int, ...],
        outputs: list[EngineOutput],
        logprobs: HostLogprobs | None,
        row: int,
    ) -> None:
        """Adds tokens to a sequence, up to the one that ends it.

        Args:
            outputs: gets one more; one for each token if there are stop strings, so that where one ended is known.
        """
        params, known = sequence.request.params, sequence.tokens
        output: EngineOutput | None = None
        for step, token in enumerate(tokens):
            if token == NOT_FINITE:
                outputs.append(self.fail(sequence))
                return
            known.append(token)
            if output is None or params.stop:
                output = output_of(sequence)
                outputs.append(output)
            output.new_token_ids.append(token)
            if logprobs is not None and params.wants_logprobs:
                scored = params.logprob_token_ids or ()
                entry = logprobs.entry((step, row), token, top=params.logprobs or 0, scored=scored)
                output.new_logprobs = [*(output.new_logprobs or ()), entry]
            if sequence.prompt_logprobs is not None and len(known) == sequence.num_prompt_tokens + 1:
                output.prompt_logprobs = sequence.prompt_logprobs
            if sequence.constraint is not None and not sequence.constraint.accept(token):
                outputs.append(self.refuse(sequence))
                return
            if (reason := _end_of(sequence, token)) is not None:
                output.finish_reason = reason
                output.stop_reason = token if reason == "stop" and token in params.stop_token_ids else None
                self._give(sequence)
                self._finish(sequence)
                return

    def _take_vector(self, sequence: Sequence, state: tuple[int, ...], vector: Vectors) -> EngineOutput:
        """Ends a sequence whose text has been read to its end."""
        if state == (NOT_FINITE,):
            return self.fail(sequence)
        self._finish(sequence)
        output = output_of(sequence, finish_reason="stop")
        # Copies: a step's arrays would live as long as any of their rows.
        output.vectors = np.concatenate(sequence.vectors) if sequence.vectors else vector.copy()
        sequence.vectors.clear()
        return output


def output_of(sequence: Sequence, *, finish_reason: str | None = None) -> EngineOutput:
    """An output of a sequence without tokens."""
    return EngineOutput(
        request_id=sequence.request.request_id,
        index=sequence.index,
        times=sequence.times,
        new_token_ids=[],
        num_cached_tokens=sequence.num_cached_tokens,
        finish_reason=finish_reason,
    )


def _end_of(sequence: Sequence, token: int) -> str | None:
    """Why a sequence ends with its last token; None: it goes on."""
    request, written = sequence.request, len(sequence.tokens) - sequence.num_prompt_tokens
    if token in request.stop_token_ids and written > request.params.min_tokens:
        return "stop"
    if sequence.constraint is not None and sequence.constraint.stopped:
        return "stop"  # nothing more can follow
    if len(sequence.tokens) >= sequence.end:
        return "length"
    repetition = request.params.repetition_detection
    if repetition is not None and written >= request.params.min_tokens:
        return REPETITION if repetition.repeats(sequence.tokens, start=sequence.num_prompt_tokens) else None
    return None


def _is_sampled(sequence: Sequence, following: StepPlan | None) -> bool:
    """Whether a dispatch in flight samples the next token, without waiting for the host's mask."""
    return sequence.in_flight > 0 and following is not None and not following.waits


def _forced(sequence: Sequence) -> Iterator[int]:
    """The tokens that must follow those of a step; called once these are accepted."""
    if sequence.constraint is not None:
        yield from sequence.constraint.forced()


def _take_prompt_logprobs(rows: list[Row], logprobs: HostLogprobs) -> None:
    """Appends the scores of the prompt tokens that rows have predicted to their sequences."""
    at = 0  # index of the row's first token
    for row in rows:
        sequence = row.sequence
        if sequence.wants_prompt_logprobs:
            if sequence.prompt_logprobs is None:
                sequence.prompt_logprobs = [None]
            top = sequence.request.params.prompt_logprobs or 0
            for offset in range(row.count):
                position = row.start + offset + 1
                # A recomputed chunk brings positions again that are there already.
                if len(sequence.prompt_logprobs) == position < sequence.num_prompt_tokens:
                    entry = logprobs.entry(at + offset, sequence.tokens[position], top=top)
                    sequence.prompt_logprobs.append(entry)
        at += row.count


def _take_token_vectors(rows: list[Row], vectors: Vectors) -> None:
    """Adds the vectors of the rows' tokens to sequences that ask for them; ``vectors``: f32 [T, size]."""
    at = 0  # index of the row's first token
    for row in rows:
        sequence = row.sequence
        if row.wants_tokens and sequence.status is not Status.FINISHED:
            if row.start == 0:
                sequence.vectors.clear()  # from before it was preempted
            sequence.vectors.append(vectors[at : at + row.count])
        at += row.count
