"""The scheduler: chooses the tokens that the next step computes, by continuous batching with chunked prefill."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import msgspec

from llmjax.engine.core.adapters import AdapterSlots
from llmjax.engine.core.kv_cache import KVCache
from llmjax.engine.core.media import Encoding
from llmjax.engine.core.media_rows import MediaRows
from llmjax.engine.core.request import Sequence, Status
from llmjax.engine.core.waiting import WaitingQueue

LEAST_CHUNK = 16  # prompt tokens of a step, however many decodes it has
NO_DRAFTS: Mapping[Sequence, tuple[int, ...]] = MappingProxyType({})


class Row(msgspec.Struct, gc=False):  # each plan makes one for each sequence; it is in no reference cycle
    """One sequence's part of a dispatch: its tokens ``start : start + count``, and with ``steps`` above 1 all that it
    samples but the last one, or drafts of them."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the last of them is the sequence's last known token, so the step samples the next one
    steps: int = 1  # tokens to sample one after another; fewer if the sequence ends, or drafts are rejected
    masked: bool = False  # the host has to make the mask
    drafts: tuple[int, ...] = ()  # guesses at all sampled tokens but the last; all are computed in one step

    @property
    def span(self) -> int:
        """Tokens whose keys and values the dispatch stores."""
        return self.count + self.steps - 1

    @property
    def reads_device(self) -> bool:
        """The input token was sampled by a dispatch before and has not been read by the host."""
        return self.count == 1 and self.start >= len(self.sequence.tokens)

    @property
    def wants_tokens(self) -> bool:
        """Whether vectors of its tokens are asked for."""
        pooling = self.sequence.request.pooling
        return pooling is not None and pooling.of_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt tokens that it predicts are asked for."""
        return self.start < self.sequence.num_prompt_tokens and self.sequence.wants_prompt_logprobs


@dataclass(frozen=True)
class StepPlan:
    """What one dispatch computes. Rows of one token come first."""

    rows: list[Row]
    admitted: list[Sequence] = field(default_factory=list)
    num_preempted: int = 0
    encodings: list[Encoding] = field(default_factory=list)  # images that the encoder is asked for
    image_queries: int = 0  # images that sequences have been given since the plan before
    images_asked: int = 0  # of these, those that the encoder was asked for
    encoder_parts: int = 0  # of the encoder's runs, which come before it

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the first step."""
        return sum([row.count + len(row.drafts) for row in self.rows])

    @cached_property
    def drafts(self) -> int:
        """Most drafts that a row has."""
        return max([len(row.drafts) for row in self.rows], default=0)

    @cached_property
    def steps(self) -> int:
        """Most steps that a row takes."""
        return max([row.steps for row in self.rows], default=1)

    @cached_property
    def decode_only(self) -> bool:
        """Whether the decode family of programs can run it: each row has one token, which is not of an image, and none
        scores its prompt."""
        prompts = [row for row in self.rows if row.start < row.sequence.num_prompt_tokens]
        other = any(row.scores_prompt or row.start < row.sequence.media_end for row in prompts)
        return self.num_tokens == len(self.rows) and not other

    @cached_property
    def spans(self) -> bool:
        """Whether there are tokens of images that see later ones."""
        seeing = (row.sequence.request.media for row in self.rows if row.start < row.sequence.media_end)
        return any(media is not None and media.wholes for media in seeing)

    @cached_property
    def adapters(self) -> bool:
        """Whether some rows are computed with an adapter."""
        return any(row.sequence.adapter_slot for row in self.rows)

    @cached_property
    def waits(self) -> bool:
        """Whether the step is sampled later, by masks that follow from tokens that the host has to read first."""
        return any(row.masked for row in self.rows)


@dataclass(frozen=True)
class _Refusal:
    """The first waiting sequence did not fit. Trying again before something has changed would only search its whole
    prompt once more."""

    sequence: Sequence
    available: tuple[int, ...]  # pages, by group
    prefix: int  # pages found in the prefix cache
    snapshots: int  # `KVCache.num_snapshots`

    def holds(self, sequence: Sequence, kv: KVCache) -> bool:
        """Whether it would not fit now either."""
        grown = any(now > then for now, then in zip(kv.available, self.available, strict=True))
        known = kv.num_snapshots > self.snapshots or kv.longer_prefix(sequence, self.prefix)
        return sequence is self.sequence and not grown and not known


class Scheduler:
    """Queues, slots and the token budget.

    Running sequences go first, decodes before prefill chunks; what is left of the budget admits waiting ones in order
    (arrival, or priority then arrival). When pages run out, the sequence served last gives its pages up and is
    computed again later.

    Args:
        kv: pages of all sequences.
        max_num_seqs: slots.
        max_num_batched_tokens: most tokens of a step; at least ``max_num_seqs``, so that every decode fits.
        whole_prompts: whether prompts are not cut into chunks; none is longer than a step then.
        chunk_steps: how much more a step with a chunk costs than a step of decodes, as a number of decoded tokens. Up
            to this number of forced tokens for each running sequence are decoded one after another, not as a chunk.
        micro_batches: number of parts into which decodes are divided, each of them a step. So a step need not continue
            the one before: one pipeline stage computes the next step while another computes the last one.
        media: the rows of images; None: there are none.
        adapters: the slots for adapters; None: there are no adapters.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        whole_prompts: bool = False,
        chunk_steps: int = 0,
        micro_batches: int = 1,
        media: MediaRows | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.kv = kv
        self.adapters = adapters
        self.media = media or MediaRows()
        self.chunk_steps = chunk_steps
        self.micro_batches = micro_batches
        self.whole_prompts = whole_prompts
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []  # by rank
        self._waiting = WaitingQueue(adapters)
        self._num_waiting = 0
        self._held: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._refusal: _Refusal | None = None

    @property
    def num_waiting(self) -> int:
        return self._num_waiting + len(self._held)

    @property
    def idle(self) -> bool:
        return not self.running and not self.num_waiting

    @property
    def held(self) -> list[Sequence]:
        """Sequences that cannot be computed before `let_in`."""
        return list(self._held)

    @property
    def only_held(self) -> bool:
        """Whether all sequences are held."""
        return not self.running and not self._num_waiting and bool(self._held)

    def hold(self, sequence: Sequence) -> None:
        """Keeps a sequence out of the queue, where the others pass it."""
        sequence.status = Status.WAITING
        self._held.append(sequence)

    def let_in(self, sequences: Iterable[Sequence]) -> None:
        """Queues some of those that are held."""
        for sequence in sequences:
            self._held.remove(sequence)
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queues a new or preempted sequence."""
        sequence.status = Status.WAITING
        self._waiting.add(sequence)
        self._num_waiting += 1

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives its pages and slot back."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence in self._held:
            self._held.remove(sequence)
        elif sequence.status is Status.WAITING:
            self._num_waiting -= 1  # its place in the queue is dropped when it comes up
        self.media.release(sequence)
        sequence.status = Status.FINISHED

    @property
    def waiting_heads(self) -> list[Sequence]:
        """The first of the waiting sequences of each adapter."""
        return [] if self.adapters is None else self._waiting.heads()

    def waiting_for(self, digest: str) -> list[Sequence]:
        """The sequences that wait for adapters."""
        return self._waiting.of(digest)

    @property
    def streams(self) -> bool:
        """Whether a running sequence generates tokens."""
        return any(sequence.num_computed >= sequence.num_prompt_tokens for sequence in self.running)

    @property
    def only_decodes(self) -> bool:
        """Whether the next dispatch is one token of each running sequence, because none is in its prompt and no
        sequence can be admitted."""
        return not self._may_admit and all(s.missing <= 1 for s in self.running)

    @property
    def _may_admit(self) -> bool:
        """Whether the next dispatch may admit a sequence."""
        return bool(self._num_waiting and self._free_slots) and self._waiting.first() is not None

    def plan(
        self,
        *,
        max_steps: int = 1,
        drafts: Mapping[Sequence, tuple[int, ...]] = NO_DRAFTS,
        chunk_tokens: int | None = None,
    ) -> StepPlan:
        """The next dispatch. Empty if nothing can run before a step in flight has been read.

        Args:
            max_steps: most decode steps; it takes more than one only if no sequence waits for it to end.
            drafts: guesses at what follows the tokens of sequences of which nothing is in flight. They are used if
                there are `only_decodes`, as far as there is room for them; then the dispatch is one step.
            chunk_tokens: most tokens of a step that has both decodes and prompt chunks, because the decodes wait for
                the chunks; None: as many as any step may have.
        """
        self.kv.begin_plan()
        self.media.begin_plan()
        decodes: list[Sequence] = []
        chunks: list[Sequence] = []
        for sequence in self.running:
            if (missing := sequence.missing) and not self.media.awaits(sequence):
                one_by_one = missing == 1 or (sequence.forced and missing <= self.chunk_steps * len(self.running))
                (decodes if one_by_one else chunks).append(sequence)
        if self.micro_batches > 1 and not drafts:
            decodes = self._micro_batch(decodes, others=bool(chunks))
        budget, preempted = self.max_num_batched_tokens, 0
        if chunk_tokens is not None and decodes and not self.whole_prompts and not self._whole_images:
            budget = min(budget, max(chunk_tokens, len(decodes) + LEAST_CHUNK))
        counts: dict[Sequence, int] = {}
        for sequence in (*decodes, *chunks):
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one before it
            if budget <= 0:
                break
            count = min(sequence.missing, budget) if chunks else 1
            if sequence.num_computed < sequence.media_end and not (count := self.media.reach(sequence, count)):
                continue  # the next image is not encoded
            fits = sequence.num_computed + count <= sequence.room or self.kv.reserve(sequence, count)
            while not fits and not self.kv.waits_for_step(sequence):
                victim = self.running[-1]
                self._preempt(victim)
                preempted += 1
                budget += counts.pop(victim, 0)
                if victim is sequence:
                    break
                fits = self.kv.reserve(sequence, count)
            if fits:
                counts[sequence] = count
                budget -= count
        guesses = {} if preempted or not (drafts and self.only_decodes) else self._fitting(counts, drafts)
        steps = 1 if preempted or chunks or guesses else self._steps(counts, max_steps)
        rows = []
        for sequence, count in counts.items():  # only now: until here a row could still be preempted
            start, known = sequence.num_computed, len(sequence.tokens) + sequence.in_flight
            own = guesses.get(sequence, ())
            steps_now = 1 + len(own) if guesses else min(steps, sequence.steps_left) if steps > 1 else 1
            samples = start + count == known
            rows.append(Row(sequence, start, count, samples, steps_now, samples and sequence.needs_mask, own))
            self.kv.advance(sequence, count + steps_now - 1)
        # An adapter may have been read since it was found that no sequence can be admitted.
        admitted = [] if preempted or guesses or steps > 1 else self._admit(budget, rows)
        if chunks or admitted:
            rows.sort(key=_longer_than_one)
        queries, asked = self.media.take_counts() if rows else (0, 0)
        return StepPlan(
            rows=rows,
            admitted=admitted,
            num_preempted=preempted,
            encodings=self.media.take_encodings(),
            image_queries=queries,
            images_asked=asked,
        )

    @property
    def _whole_images(self) -> bool:
        """Whether an image may come that has to be computed in one step."""
        waiting = [] if (first := self._waiting.first()) is None else [first]
        media = (sequence.request.media for sequence in (*self.running, *waiting) if sequence.missing > 1)
        return any(one is not None and one.wholes for one in media)

    def _micro_batch(self, decodes: list[Sequence], *, others: bool) -> list[Sequence]:
        """The decodes whose turn it is: none of their steps is in flight, so their next one may begin before the last
        dispatch ends. Where all are in flight, the first ones are separated from the others.

        Args:
            others: the step has chunks to compute meanwhile.
        """
        ready = [sequence for sequence in decodes if not sequence.in_flight]
        if not ready and not others:
            ready = decodes
        return ready[: -(-len(decodes) // self.micro_batches)]

    def _fitting(
        self, counts: dict[Sequence, int], drafts: Mapping[Sequence, tuple[int, ...]]
    ) -> dict[Sequence, tuple[int, ...]]:
        """The beginnings of the drafts that can run without the host in between, and for which there are pages."""
        fitting = {}
        for sequence in counts:
            own = drafts.get(sequence, ())[: min(sequence.steps_left, sequence.steps_alone) - 1]
            span = 1 + len(own)
            if own and (sequence.num_computed + span <= sequence.room or self.kv.reserve(sequence, span)):
                fitting[sequence] = own
        return fitting

    def _steps(self, counts: dict[Sequence, int], max_steps: int) -> int:
        """Decode steps for sequences that each compute one token: as many as the host is not needed for in between, and
        as there are pages for."""
        if max_steps == 1 or not counts:
            return 1
        steps = min(max_steps, max([sequence.steps_left for sequence in counts]))
        for sequence in counts:
            if sequence.num_computed < sequence.num_prompt_tokens and sequence.wants_prompt_logprobs:
                return 1
            if sequence.num_computed < sequence.media_end:
                return 1
            if sequence.missing > 1 or sequence.needs_mask:
                return 1
            if sequence.between and sequence.steps_alone < sequence.steps_left:
                steps = min(steps, sequence.steps_alone)
        if self._num_waiting:
            # Only the end of a running sequence admits a waiting one, so that end must not wait for other rows.
            if self._may_admit or len(counts) < len(self.running):
                return 1
            steps = min(steps, *[sequence.steps_left for sequence in counts])
        for sequence in counts if steps > 1 else ():
            span = min(steps, sequence.steps_left)
            if sequence.num_computed + span > sequence.room and not self.kv.reserve(sequence, span):
                return 1
        return max(steps, 1)

    def _admit(self, budget: int, rows: list[Row]) -> list[Sequence]:
        admitted = []
        while budget > 0 and self._free_slots and (sequence := self._waiting.first()) is not None:
            if self._refusal is not None and self._refusal.holds(sequence, self.kv):
                break
            if self.whole_prompts and sequence.missing > budget:
                break
            sequence.slot = self._free_slots[-1]
            cached = self.kv.attach_prefix(sequence)
            if cached is None:
                sequence.slot = -1
                break
            missing = sequence.missing
            count = self.media.reach(sequence, min(missing, budget))
            if not count:
                self.kv.release(sequence)
                sequence.slot = -1
                self.media.put_off(sequence)
                if not self.media.awaits(sequence):
                    break
                self._waiting.leave(sequence)
                self._num_waiting -= 1
                self.hold(sequence)
                continue
            chunk = min(missing, self.max_num_batched_tokens)
            if not self.kv.fits(sequence, chunk=chunk) or not self.kv.reserve(sequence, count):
                self.kv.release(sequence)
                self.media.release(sequence)
                sequence.slot = -1
                self._refusal = _Refusal(
                    sequence, self.kv.available, cached // self.kv.page_size, self.kv.num_snapshots
                )
                break
            self._refusal = None
            self._free_slots.pop()
            sequence.adapter_slot = self._waiting.pop(sequence)
            self._num_waiting -= 1
            sequence.status = Status.RUNNING
            if sequence.times.scheduled is None:
                sequence.times.scheduled = time.monotonic()
                sequence.num_cached_tokens = cached
            insort(self.running, sequence, key=_rank)
            samples = cached + count == sequence.num_tokens
            rows.append(Row(sequence, cached, count, samples, masked=samples and sequence.needs_mask))
            self.kv.advance(sequence, count)
            admitted.append(sequence)
            budget -= count
        return admitted

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.times.num_preemptions += 1
        self.add(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.kv.release(sequence)
        self.media.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        if sequence.adapter_slot and self.adapters is not None:
            self.adapters.release(sequence.adapter_slot)
            sequence.adapter_slot = 0


def names_of(sequences: Iterable[Sequence]) -> list[str]:
    """The names of the adapters of sequences, in order."""
    return sorted({s.request.adaptation.name for s in sequences if s.request.adaptation is not None})


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _longer_than_one(row: Row) -> bool:
    return row.count > 1
