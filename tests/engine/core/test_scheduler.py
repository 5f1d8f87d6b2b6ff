"""Engine, scheduler and KV cache over a simulated device that knows what every page holds.

The device gets only the packed batch, as the real one does. In place of keys and values it stores, for each
token, a digest of the token and everything before it, and every row compares all entries that attention would read
with those of its own history. So a page that was shared, freed, evicted or overwritten wrongly shows at the first read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from llmjax.config import EngineConfig
from llmjax.engine.core.adapters import AdapterSlots
from llmjax.engine.core.engine import Engine
from llmjax.engine.core.kv_cache import KVCache
from llmjax.engine.core.layer_states import FullPages, GroupSpec, StateSlots, TableChanges
from llmjax.engine.core.listener import CacheListener
from llmjax.engine.core.media import EncoderAdapter, Encoding, PromptImage, PromptMedia, Whole
from llmjax.engine.core.media_rows import MediaRows
from llmjax.engine.core.pace import ChunkPace, EncoderPace, Pace
from llmjax.engine.core.page_pool import DUMMY_PAGE
from llmjax.engine.core.request import EngineOutput, EngineRequest, Sequence, SequenceTimes
from llmjax.engine.core.scheduler import LEAST_CHUNK, Row, Scheduler, StepPlan
from llmjax.engine.core.tier import Giver, NoTier, PageContent, Tier
from llmjax.engine.device.batch import READ_DEVICE, BatchLayout, make_buckets
from llmjax.engine.device.device_state import NO_TOKEN, StepOutput
from llmjax.engine.device.media import MediaShape
from llmjax.engine.device.pending import PendingStep
from llmjax.engine.device.rows import ENDED, ROW, NewRow, row_words
from llmjax.engine.drafts.speculation import Speculation
from llmjax.engine.loading.memory import plan_kv
from llmjax.engine.tiers.disk import DiskPages
from llmjax.engine.tiers.host import HostPages, PageFormat
from llmjax.engine.tiers.offload import Offload, Taker
from llmjax.errors import CheckpointError, ConfigError, LLMJaxError
from llmjax.kernels.attention import KVLayout
from llmjax.media.image import PreparedImage
from llmjax.models import RMS, Attention, GatedMLP, LayerSpec, ModelConfig
from llmjax.models.layers.state import AllTokens, LastState, LastTokens, Recurrent, Span
from llmjax.sampling.logprobs import LogprobArrays
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.settings import RequestSampling
from llmjax.speculative import SpeculativeConfig

pytestmark = pytest.mark.smoke

VOCAB = 5
STOP = 4
ALL, STATE = AllTokens(), LastState()
MEDIA = MediaShape(num_rows=1, size=1, dtype="float32", axes=True)
ROW_TOKEN = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of an engine."""

    page_size: int
    spans: tuple[Span, ...]  # of the groups
    num_pages: tuple[int, ...]  # a group, the dummy page included
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    share_prefixes: bool = True
    decode_steps: int = 1  # in one dispatch at most
    leave_early: bool = False  # rows may have fewer steps than were planned for them, but for the first
    drafts: int = 0  # of a row at most
    drafted_rows: int = 4  # rows of a step with drafts, at most
    host_pages: int = 0  # evicted ones that are kept
    folder: Path | None = None  # where they are kept, too
    micro_batches: int = 1  # of decodes
    media_rows: int = 0  # of the pool; 0: prompts have no images
    wholes: bool = False  # whether tokens of prompts with images see later ones
    encoder_budget: int = 0  # rows that are encoded before a step
    adapters: int = 0  # slots for them
    slow_reads: int = 0  # questions after which an adapter has been read

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_model_len // self.page_size)


def digests(tokens: Seq[int]) -> list[int]:
    """What the pages hold for each token: a digest of it and of everything before it."""
    found, digest = [], 0
    for token in tokens:
        digest = hash((digest, token))
        found.append(digest)
    return found


def row_at(media: PromptMedia, position: int) -> tuple[bytes, int] | None:
    """The image, and the row of it, that stands at a position of a prompt; None: a token."""
    for image in media.images:
        if (found := np.flatnonzero(image.rows == position)).size:
            return image.image.digest, int(found[0])
    return None


def with_images(request: EngineRequest, tokens: Seq[int]) -> list[Any]:
    """A request's tokens with the rows of its images in place of their ids, and with its adapter, as they all depend on
    it."""
    found = list(tokens) if (media := request.media) is None else [row_at(media, i) or t for i, t in enumerate(tokens)]
    return found if request.adaptation is None else [(request.adaptation.digest, token) for token in found]


def next_token(digest: int, seed: int) -> int:
    return hash((digest, seed)) % VOCAB


def alone(
    prompt: list[int],
    seed: int,
    max_tokens: int,
    stops: frozenset[int],
    *,
    min_tokens: int = 0,
    adapted: str | None = None,
) -> list[int]:
    """The output of a request that has the device to itself.

    Args:
        adapted: digest of its adapter.
    """
    output: list[int] = []
    while len(output) < max_tokens and not (len(output) > min_tokens and output[-1] in stops):
        made = output if adapted is None else [(adapted, token) for token in output]
        output.append(next_token(digests([*prompt, *made])[-1], seed))
    return output


@dataclass(frozen=True)
class SimulatedPages:
    """The content of pages when they were read: digests by offset, and a mask of the offsets that have one."""

    found: list[PageContent]

    def contents(self) -> list[PageContent]:
        return self.found


@dataclass
class SimulatedRun:
    """A run of the encoder, whose last part brings the rows."""

    encodings: list[Encoding]
    left: int
    rows: dict[int, tuple[bytes, int]]

    def start_part(self) -> None:
        self.left -= 1
        for encoding in () if self.left else self.encodings:
            for index, place in enumerate(encoding.places.tolist()):
                self.rows[place] = (encoding.key, index)


def tier_of(shape: Shape, taker: Taker | None = None) -> Tier:
    if not shape.host_pages:
        return NoTier()
    content = (
        jax.ShapeDtypeStruct((shape.page_size,), np.int64),
        jax.ShapeDtypeStruct((shape.page_size,), np.bool_),
    )
    disk = None
    if shape.folder is not None:
        formats = [PageFormat(shape.page_size, content)] * len(shape.spans)
        disk = DiskPages(shape.folder, identity="ab" * 16, limit=2**20, formats=formats)
    each = 9 * shape.page_size
    return Offload(HostPages(shape.host_pages * each), disk, page_bytes=[each] * len(shape.spans), taker=taker)


@dataclass
class SimulatedDevice:
    """A runner without weights. It checks every read against the tokens it knows each sequence to have."""

    shape: Shape
    content: list[dict[tuple[int, int], int]] = field(init=False)  # per group: (page, offset) -> digest; states at 0
    history: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # by request id and continuation
    rows: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # of the media pool: an image and a row of it
    adapters: dict[int, str] = field(default_factory=dict)  # digests, by slot
    loads: list[tuple[int, str]] = field(default_factory=list)  # all of them, in order
    asked: Counter[str] = field(default_factory=Counter)  # how often it was asked for contents, by digest
    unreadable: set[str] = field(default_factory=set)
    seeing: frozenset[str] = frozenset("ac")  # those that change the encoder of images
    in_flight: dict[int, set[int]] = field(default_factory=dict)  # slots of adapters of dispatches that were not read
    dispatches: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        self.content = [{} for _ in shape.spans]
        self.chance = random.Random(0)
        self.buckets = make_buckets(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            decode_steps=shape.decode_steps,
            drafts=shape.drafts,
            drafted_rows=shape.drafted_rows,
            spans=shape.wholes,
            adapters=bool(shape.adapters),
        )
        # As in ``RowState``.
        self.last_token = np.zeros(shape.max_num_seqs, np.int32)
        self.length = np.zeros(shape.max_num_seqs, np.int32)
        self.words = np.zeros(shape.max_num_seqs, ROW)
        self.page_tables = np.zeros((len(shape.spans), shape.max_num_seqs, shape.pages_per_sequence), np.int32)

    def read_pages(self, group: int, pages: Seq[int]) -> SimulatedPages:
        content, size = self.content[group], self.shape.page_size
        return SimulatedPages(
            [
                (
                    np.array([content.get((page, offset), 0) for offset in range(size)], np.int64),
                    np.array([(page, offset) in content for offset in range(size)]),
                )
                for page in pages
            ]
        )

    def write_pages(self, group: int, pages: Seq[int], contents: Seq[PageContent]) -> None:
        for page, (values, there) in zip(pages, contents, strict=True):
            for offset in range(self.shape.page_size):
                self.content[group].pop((page, offset), None)
                if there[offset]:
                    self.content[group][page, offset] = int(values[offset])

    def most_steps(self, rows: int) -> int:
        return self.shape.decode_steps

    def most_drafts(self, rows: int) -> int:
        return max([bucket.drafts for bucket in self.buckets if bucket.rows >= rows], default=0)

    def can_encode(self, media: PromptMedia, adaptation: Adaptation | None, *, seconds: float = 0.0) -> bool:
        return True

    def encoder_run(self, encodings: Seq[Encoding]) -> SimulatedRun:
        own = encodings[: self.chance.randint(1, len(encodings))]
        return SimulatedRun(list(own), left=self.chance.randint(1, 3), rows=self.rows)

    def can_load(self, adaptation: Adaptation, *, seconds: float = 0.0) -> bool:
        if adaptation.digest in self.unreadable:
            raise CheckpointError(f"{adaptation.name} has changed")
        self.asked[adaptation.digest] += 1
        return self.asked[adaptation.digest] > self.shape.slow_reads

    def of_encoder(self, adaptation: Adaptation) -> EncoderAdapter | None:
        return EncoderAdapter(adaptation.digest, []) if adaptation.digest in self.seeing else None

    def load_adapter(self, slot: int, adaptation: Adaptation) -> None:
        assert 1 <= slot <= self.shape.adapters
        assert not any(slot in used for used in self.in_flight.values()), "a dispatch in flight uses the slot"
        self.adapters[slot] = adaptation.digest
        self.loads.append((slot, adaptation.digest))

    def dispatch(
        self, plan: StepPlan, *, tables: TableChanges, sampling: dict[Any, RequestSampling], media: MediaRows
    ) -> Any:
        bucket = next(bucket for bucket in self.buckets if bucket.holds(plan))
        layout = BatchLayout(
            bucket=bucket,
            num_slots=self.shape.max_num_seqs,
            pages_per_sequence=self.shape.pages_per_sequence,
            num_groups=len(self.shape.spans),
            media=replace(MEDIA, whole=self.shape.wholes) if self.shape.media_rows else None,
        )
        new = [
            NewRow(row.sequence.slot, row.start, row_words(row.sequence, sampling[row.sequence]))
            for row in plan.rows
            if row.sequence in plan.admitted
        ]
        *before, last = tables.chunks(layout.room)
        for chunk in before:
            self._write(chunk.entry, chunk.page)
        part = layout.parts(layout.pack(plan, new=new, tables=last, media=media))
        self._check_images(plan, part)
        self._begin(part)
        for i, row in enumerate(plan.rows):
            assert part["steps"][i] == (row.steps if row.samples else 0)
            assert row.sequence in sampling
            check_host_is_in_time(row)
        tokens = np.full((bucket.steps + bucket.drafts, len(part["slot"])), NO_TOKEN, np.int32)
        # The score of a token is its position, that of a prompt token the token itself, so that a shifted one shows.
        positions = np.zeros(tokens.shape, np.int32)
        steps = [self.chance.randint(1, row.steps) if self.shape.leave_early else row.steps for row in plan.rows]
        if plan.drafts:
            self._verify(plan, part, tokens, positions, steps)
        for done in range(0 if plan.drafts else plan.steps):
            self._run(plan, part, done, tokens, positions, [count > done for count in steps])
        targets = part.get("targets")
        self.dispatches += 1
        self.in_flight[number := self.dispatches] = {row.sequence.adapter_slot for row in plan.rows}
        output = StepOutput(
            tokens=tokens,
            logprobs=scores(positions),
            prompt_logprobs=None if targets is None else scores(targets),
            ends=None,
        )
        return PendingStep(plan=plan, bucket=bucket, result=lambda: self._read(number, output))

    def _read(self, number: int, output: StepOutput) -> StepOutput:
        self.in_flight.pop(number, None)
        return output

    def _check_images(self, plan: StepPlan, part: dict[str, np.ndarray]) -> None:
        """Each token of an image has its row of the pool, other tokens none; all tokens have their positions."""
        at = 0
        for row in plan.rows:
            media = row.sequence.request.media
            for position in range(row.start, row.start + row.count):
                wanted = None if media is None else row_at(media, position)
                adaptation = row.sequence.request.adaptation
                if wanted is not None and adaptation is not None and adaptation.digest in self.seeing:
                    wanted = wanted[0] + adaptation.digest.encode(), wanted[1]
                place = int(part["media_places"][at]) if "media_places" in part else -1
                assert self.rows.get(place) == wanted, "a token has the row of another"
                if media is not None and position < row.sequence.num_prompt_tokens and "media_axes" in part:
                    assert part["media_axes"][:, at].tolist() == [position] * 3
                elif "media_axes" in part:
                    assert part["media_axes"][:, at].tolist() == [-1] * 3
                wholes = () if media is None else media.wholes
                last = next((one.end - 1 for one in wholes if one.start <= position < one.end), -1)
                assert last == (part["media_last_key"][at] if "media_last_key" in part else -1)
                at += 1
            at += len(row.drafts)
            for end in (row.start, row.start + row.count) if media is not None else ():
                assert not any(one.start < end < one.end for one in media.wholes), "what is whole is cut"

    def _write(self, entry: np.ndarray, page: np.ndarray) -> None:
        known = entry < self.page_tables.size
        self.page_tables.reshape(-1)[entry[known]] = page[known]

    def _begin(self, part: dict[str, np.ndarray]) -> None:
        self._write(part["entry"], part["page"])
        for slot, length, words in zip(part["new_slot"], part["new_length"], part["new_words"], strict=True):
            if slot < self.shape.max_num_seqs:
                self.length[slot], self.words[slot] = length, words.view(ROW)[0]

    def _run(
        self,
        plan: StepPlan,
        part: dict[str, np.ndarray],
        done: int,
        sampled: np.ndarray,
        positions: np.ndarray,
        stay: list[bool],
    ) -> None:
        """One pass over the rows that are alive and stay; fills row ``done`` of what is sampled and where."""
        inputs, known = [], {}
        for i, row in enumerate(plan.rows):
            slot = int(part["slot"][i])
            first, end = part["query_start"][i : i + 2]
            tokens = part["tokens"][first:end].tolist() if not done else [READ_DEVICE]
            tokens = [int(self.last_token[slot]) if token == READ_DEVICE else token for token in tokens]
            if ENDED in tokens or done >= max(1, part["steps"][i]) or not stay[i]:
                continue
            length = int(self.length[slot]) + len(tokens)
            assert length <= row.start + row.count + done, "the host does not know how long a sequence may be"
            request = row.sequence.request
            history = self.history.setdefault((request.request_id, row.sequence.index), [*request.prompt_token_ids])
            assert tokens == history[length - len(tokens) : length], "a step computes tokens that are not the request's"
            self._check_adapter(slot, request)
            inputs.append((slot, length - len(tokens), length))
            known[slot] = digests(with_images(request, history))
        for group, span in enumerate(self.shape.spans):
            if span == STATE:
                self._run_states(group, inputs, known)
            else:
                self._run_pages(group, inputs, known)
        rows = {int(slot): i for i, slot in enumerate(part["slot"][: len(plan.rows)])}
        for slot, _, length in inputs:
            self.length[slot] = length
            i = rows[slot]
            if part["steps"][i]:
                sampled[done, i] = self._sample(plan.rows[i], known[slot][length - 1], length)
                positions[done, i] = length

    def _verify(
        self,
        plan: StepPlan,
        part: dict[str, np.ndarray],
        sampled: np.ndarray,
        positions: np.ndarray,
        most: list[int],
    ) -> None:
        """One pass over rows with drafts, which are stored like all tokens, right or wrong."""
        inputs, known, alive = [], {}, []
        for i, row in enumerate(plan.rows):
            slot = int(part["slot"][i])
            first, end = part["query_start"][i : i + 2]
            tokens = part["tokens"][first:end].tolist()
            assert tuple(tokens[1:]) == row.drafts
            tokens[0] = int(self.last_token[slot]) if tokens[0] == READ_DEVICE else tokens[0]
            if tokens[0] == ENDED:
                continue
            start = int(self.length[slot])
            assert start == row.start, "drafts follow from tokens that are known"
            self._check_adapter(slot, row.sequence.request)
            history = self.history[row.sequence.request.request_id, row.sequence.index]
            assert history[start:] == tokens[:1]
            inputs.append((slot, start, start + len(tokens)))
            known[slot] = digests(with_images(row.sequence.request, [*history[:start], *tokens]))
            alive.append((i, slot, start, tokens))
        for group in range(len(self.shape.spans)):
            self._run_pages(group, inputs, known)
        for i, slot, start, tokens in alive:
            for place in range(len(tokens)):
                self.length[slot] = positions[place, i] = start + place + 1
                found = self._sample(plan.rows[i], known[slot][start + place], start + place + 1)
                sampled[place, i] = found
                if self.last_token[slot] == ENDED or [found] != tokens[place + 1 : place + 2] or place + 1 >= most[i]:
                    break

    def _check_adapter(self, slot: int, request: EngineRequest) -> None:
        wanted = None if request.adaptation is None else request.adaptation.digest
        assert self.adapters.get(int(self.words[slot]["adapter"])) == wanted, "a row is computed with another adapter"

    def _run_pages(self, group: int, inputs: list[tuple[int, int, int]], known: dict[int, list[int]]) -> None:
        """Stores the rows' tokens, then reads what attention reads."""
        span = self.shape.spans[group]
        written: set[tuple[int, int]] = set()
        for i, start, length in inputs:
            for position in range(start, length):
                place = self._place(group, i, position)
                assert place[0] != DUMMY_PAGE, "a token has no page"
                assert place not in written, "two tokens of a step share a place"
                written.add(place)
                self.content[group][place] = known[i][position]
        for i, start, length in inputs:
            oldest = max(0, start - span.window + 1) if isinstance(span, LastTokens) else 0
            for position in range(oldest, length):
                found = self.content[group].get(self._place(group, i, position))
                assert found == known[i][position], f"group {group} holds something else at position {position}"

    def _run_states(self, group: int, inputs: list[tuple[int, int, int]], known: dict[int, list[int]]) -> None:
        """Reads all rows' states, then writes them, token by token."""
        content = self.content[group]
        for i, start, _ in inputs:
            if start:
                found = content.get((self._place(group, i, start - 1)[0], 0))
                assert found == known[i][start - 1], f"group {group} holds another state than after token {start - 1}"
        # Kernels need not read all rows before they write some: no row writes what another row reads.
        readers = {self._place(group, i, start - 1)[0]: i for i, start, _ in inputs if start}
        writers: dict[int, int] = {}
        for i, start, length in inputs:
            for position in range(start, length):
                page, _ = self._place(group, i, position)
                assert page != DUMMY_PAGE, "a state has no page"
                assert writers.setdefault(page, i) == i, "two rows of a step write one state"
                assert readers.get(page, i) == i, "a row writes a state that another one reads"
                content[page, 0] = known[i][position]

    def _place(self, group: int, slot: int, position: int) -> tuple[int, int]:
        page_size = self.shape.page_size
        return int(self.page_tables[group, slot, position // page_size]), position % page_size

    def _sample(self, row: Row, digest: int, length: int) -> int:
        token, slot = next_token(digest, row.sequence.seed), row.sequence.slot
        words = self.words[slot]
        self.last_token[slot] = ENDED if token in words["stops"] and length >= words["min_len"] else token
        history = self.history[row.sequence.request.request_id, row.sequence.index]
        if len(history) == length:
            history.append(token)
        assert history[length] == token
        return token


def check_host_is_in_time(row: Row) -> None:
    """What the host does between tokens of a sequence, it can do."""
    if row.steps > 1:
        produced = row.start + row.count - row.sequence.num_prompt_tokens
        min_tokens = row.sequence.request.params.min_tokens
        assert produced >= min_tokens or produced + row.steps <= min_tokens, "min_tokens ends within a dispatch"
    if row.samples and row.sequence.request.bad_words_token_ids:
        assert row.steps == 1
        assert row.start <= len(row.sequence.tokens), "a ban needs the tokens before the last"


def scores(values: np.ndarray) -> LogprobArrays:
    return LogprobArrays(
        scored=jnp.zeros((*values.shape, 0)),
        logprob=values.astype(np.float32),
        rank=np.ones(values.shape, np.int32),
        top_ids=np.full((*values.shape, 1), -1, np.int32),
        top_logprobs=np.zeros((*values.shape, 1), np.float32),
    )


class SometimesWorthIt(Speculation):
    """What steps take is not measured, for here they take nothing."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self._chance = random.Random(0)

    def _length(self, found: object, *, rows: int, most: int) -> int:
        return self._chance.choice((most, most, max(1, most // 2), 0))


class SimulatedEngine(Engine):
    """The real engine with the simulated device."""

    def __init__(
        self,
        shape: Shape,
        *,
        listener: CacheListener | None = None,
        taker: Taker | None = None,
        giver: Giver | None = None,
    ) -> None:
        self.shape = shape
        kv = KVCache(
            tuple(GroupSpec(span=span, num_pages=n) for span, n in zip(shape.spans, shape.num_pages, strict=True)),
            page_size=shape.page_size,
            num_slots=shape.max_num_seqs,
            pages_per_sequence=shape.pages_per_sequence,
            share_prefixes=shape.share_prefixes,
            tier=tier_of(shape, taker),
            listener=listener,
            giver=giver,
        )
        device: Any = SimulatedDevice(shape)
        adapters = AdapterSlots(shape.adapters, device) if shape.adapters else None
        super().__init__(
            runner=device,
            vocab_size=VOCAB,
            seed=0,
            kv=kv,
            scheduler=Scheduler(
                kv,
                max_num_seqs=shape.max_num_seqs,
                max_num_batched_tokens=shape.max_num_batched_tokens,
                micro_batches=shape.micro_batches,
                media=MediaRows(shape.media_rows, budget=shape.encoder_budget, adapters=adapters),
                adapters=adapters,
            ),
            pace=Pace(shape.decode_steps, seconds=1e9),
            encoder_pace=EncoderPace(share=1.0),
            speculation=SometimesWorthIt(
                SpeculativeConfig(
                    num_speculative_tokens=shape.drafts,
                    prompt_lookup_max=3,
                    prompt_lookup_min=1,
                    disable_by_batch_size=shape.drafted_rows,
                )
            )
            if shape.drafts
            else None,
        )

    def check(self) -> None:
        """Each page has as many holders as sequences list it; the device's tables say what the sequences do."""
        self.kv.check()
        self.scheduler.media.check()
        running = self.scheduler.running
        assert len({sequence.slot for sequence in running}) == len(running) <= self.shape.max_num_seqs
        for group in self.kv.groups:
            listed = Counter(page for s in running for page in group.held(s) if page != DUMMY_PAGE)
            assert group.pool.used == len(listed)
            assert [group.pool.holders(page) for page in listed] == list(listed.values())
            table = group.table.copy()
            for sequence in running:
                row = table[sequence.slot]
                if isinstance(group, StateSlots):
                    pages = group._entries[sequence].pages
                    assert [row[index] for index in pages] == list(pages.values())
                    assert list(pages) == sorted(pages)
                else:
                    held = list(group.held(sequence))
                    assert row[: len(held)].tolist() == held
                row[:] = 0
            assert not table.any()


@dataclass(frozen=True)
class Arrival:
    """A request, with the times when it arrives and when it is aborted."""

    request: EngineRequest
    at: int  # engine step
    abort_at: int | None = None


def request(name: str, prompt: list[int], **options: Any) -> EngineRequest:
    """A request; ``options`` are split between the request and its sampling."""
    own = {
        key: options.pop(key)
        for key in (
            *("priority", "cache_salt", "stop_token_ids", "max_tokens", "bad_words_token_ids", "media"),
            "adaptation",
        )
        if key in options
    }
    own.setdefault("stop_token_ids", frozenset())
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=SamplingParams(seed=3, **options), **own)


@dataclass
class Result:
    """The outputs of one continuation."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    prompt_logprobs: Any = None
    logprobs: list[Any] = field(default_factory=list)


def run(engine: SimulatedEngine, arrivals: list[Arrival], *, max_steps: int) -> dict[tuple[str, int], Result]:
    """Steps until everything has ended, checking the pages after every step."""
    results: dict[tuple[str, int], Result] = {}

    def take(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            result = results.setdefault((output.request_id, output.index), Result())
            assert result.reason is None, "an ended continuation brought something"
            result.tokens += output.new_token_ids
            result.logprobs += output.new_logprobs or []
            result.reason = output.finish_reason
            result.prompt_logprobs = output.prompt_logprobs or result.prompt_logprobs

    step = 0
    while step <= max(a.at for a in arrivals) or not engine.idle:
        assert step < max_steps, "a request starves"
        for arrival in arrivals:
            if arrival.at == step:
                engine.add(arrival.request)
            if arrival.abort_at == step:
                take(engine.abort(arrival.request.request_id))
        take(engine.step())
        engine.check()
        step += 1
    return results


def check_results(arrivals: list[Arrival], results: dict[tuple[str, int], Result]) -> None:
    """Every continuation ended as it would have alone, or was aborted on the way."""
    for arrival in arrivals:
        asked, prompt = arrival.request, arrival.request.prompt_token_ids
        for index in range(asked.params.n):
            result = results.get((asked.request_id, index))
            min_tokens = asked.params.min_tokens
            marked = with_images(asked, prompt)
            expected = alone(
                marked,
                3 + index,
                asked.max_tokens,
                asked.stop_token_ids,
                min_tokens=min_tokens,
                adapted=None if asked.adaptation is None else asked.adaptation.digest,
            )
            if arrival.abort_at is not None and (result is None or result.reason == "abort"):
                assert result is None or result.tokens == expected[: len(result.tokens)]
                continue
            assert result is not None
            assert result.tokens == expected
            stopped = expected[-1] in asked.stop_token_ids and len(expected) > min_tokens
            assert result.reason == ("stop" if stopped else "length")
            if asked.params.logprobs is not None:
                assert [{t: e.logprob for t, e in entry.items()} for entry in result.logprobs] == [
                    {token: float(len(prompt) + i)} for i, token in enumerate(expected)
                ]
            if asked.params.prompt_logprobs is not None and index == 0:
                first, *rest = result.prompt_logprobs
                assert first is None
                assert [{token: e.logprob for token, e in entry.items()} for entry in rest] == [
                    {token: float(token)} for token in prompt[1:]
                ]


def check_idle(engine: SimulatedEngine) -> None:
    stats = engine.kv_stats()
    assert stats.used == 0
    assert stats.free + stats.cached == stats.total
    for group in engine.kv.groups:
        assert not (group._pages if isinstance(group, FullPages) else group._entries)  # type: ignore[attr-defined]
    assert not engine._sequences
    assert not engine._sampling
    assert len(engine.scheduler._free_slots) == engine.shape.max_num_seqs
    assert engine.scheduler.media.used == 0
    if (adapters := engine.scheduler.adapters) is not None:
        assert not any(adapters.holders(digest) for digest in adapters.loaded)


W = LastTokens
SPANS: list[tuple[Span, ...]] = [
    *[(ALL,), (ALL, W(1)), (ALL, W(3)), (ALL, W(8)), (W(6),), (W(2), W(7)), (ALL, W(2), W(5))],
    *[(STATE,), (ALL, STATE), (ALL, STATE), (W(6), STATE), (ALL, W(3), STATE)],
]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    page_size = draw(st.integers(1, 5))
    spans = draw(st.sampled_from(SPANS))
    seqs = draw(st.integers(1, 5))
    batched = max(seqs, draw(st.integers(1, 20)))
    longest = draw(st.integers(8, 30))
    # The tightest budget is one sequence's.
    num_pages = []
    for span in spans:
        alone_needs = -(-longest // page_size)
        if isinstance(span, LastTokens):
            alone_needs = min(alone_needs, -(-(span.window + batched) // page_size) + 2)
        elif span == STATE:
            alone_needs = 2
        num_pages.append(1 + alone_needs + draw(st.integers(0, 2 * alone_needs * (seqs if span == STATE else 1))))
    share_prefixes = draw(st.booleans())
    return Shape(
        page_size=page_size,
        spans=spans,
        num_pages=tuple(num_pages),
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len=longest,
        share_prefixes=share_prefixes,
        host_pages=draw(st.integers(0, 20)) if share_prefixes else 0,
        decode_steps=draw(st.sampled_from([1, 2, 3, 8])),
        drafts=0 if STATE in spans else draw(st.sampled_from([0, 0, 1, 2, 5])),
        leave_early=draw(st.booleans()),
        micro_batches=draw(st.sampled_from([1, 1, 2, 3])),
    )


def adaptation(*names: str, scale: float = 1.0) -> Adaptation:
    """Adapters with these names, of which the content is the name."""
    references = [AdapterReference(name=name, path=f"/{name}", digest=name, number=ord(name)) for name in names]
    return Adaptation.of([ScaledAdapter(reference=one, scale=scale) for one in references])


@st.composite
def workloads(draw: st.DrawFn, shape: Shape) -> list[Arrival]:
    arrivals = []
    some = [None, *map(adaptation, "abc")] if shape.adapters else [None]
    # Most prompts begin like a common text, so that prefixes are shared often.
    common = draw(st.lists(st.integers(0, VOCAB - 1), min_size=shape.max_model_len, max_size=shape.max_model_len))
    for i in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, shape.max_model_len - 1))
        shared = draw(st.integers(0, length))
        rest = random.Random(draw(st.integers(0, 2**16)))
        prompt = common[:shared] + [rest.randrange(VOCAB) for _ in range(length - shared)]
        at = draw(st.integers(0, 12))
        asked = request(
            str(i),
            prompt,
            n=draw(st.sampled_from([1, 1, 1, 2, 4])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            logprobs=draw(st.sampled_from([None, 0])),
            stop=draw(st.sampled_from([(), ("a",)])),
            min_tokens=draw(st.integers(0, 4)),
            # The simulated device ignores what is forbidden.
            bad_words_token_ids=draw(st.sampled_from([(), (), (), ((0, 0, 0),)])),
            max_tokens=draw(st.integers(1, shape.max_model_len - length)),
            stop_token_ids=draw(st.sampled_from([frozenset(), frozenset({STOP})])),
            priority=draw(st.sampled_from([0, 0, -1, 1])),
            cache_salt=draw(st.sampled_from([None, None, "a", "b"])),
            adaptation=draw(st.sampled_from(some)),
        )
        abort_at = draw(st.one_of(st.none(), st.integers(at, at + 25)))
        arrivals.append(Arrival(asked, at, abort_at))
    return arrivals


@settings(max_examples=400)
@given(st.data())
def test_random_workloads(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    arrivals = data.draw(workloads(shape))
    engine = SimulatedEngine(shape)
    # While any request is left, the one served first computes at least one more of its tokens in every step or two.
    tokens = sum((len(a.request.prompt_token_ids) + a.request.max_tokens + 2) * a.request.params.n for a in arrivals)
    results = run(engine, arrivals, max_steps=40 + 2 * tokens)
    check_results(arrivals, results)
    check_idle(engine)
    engine.kv.reset_prefix_cache()
    stats = engine.kv_stats()
    assert stats.free == stats.total


@settings(max_examples=150)
@given(st.data())
def test_random_workloads_with_adapters(data: st.DataObject) -> None:
    adapters, slow = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    shape = replace(data.draw(shapes()), adapters=adapters, slow_reads=slow)
    arrivals = data.draw(workloads(shape))
    engine = SimulatedEngine(shape)
    tokens = sum((len(a.request.prompt_token_ids) + a.request.max_tokens + 2) * a.request.params.n for a in arrivals)
    results = run(engine, arrivals, max_steps=60 + 4 * tokens)
    check_results(arrivals, results)
    check_idle(engine)


def image_of(name: str, num_rows: int) -> PreparedImage:
    """An image with a token before its rows, one after them, and one in the middle."""
    half = num_rows // 2
    tokens = (1, *[ROW_TOKEN] * half, 2, *[ROW_TOKEN] * (num_rows - half), 1)
    patches = np.zeros((0, 0), np.float32)
    return PreparedImage(patches=patches, grid=(1, 1, num_rows), num_rows=num_rows, tokens=tokens, digest=name.encode())


def prompt_with(
    parts: Seq[int | PreparedImage], *, whole: Literal["image", "prompt"] | None = None
) -> tuple[list[int], PromptMedia | None]:
    """A prompt of tokens and images, and its images; ``whole`` as in ``VisionInfo``."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        rows = len(ids) + np.flatnonzero(np.array(part.tokens) == ROW_TOKEN)
        images.append(
            PromptImage(start=len(ids), end=len(ids) + len(part.tokens), rows=rows.astype(np.int32), image=part)
        )
        ids += part.tokens
    if not images:
        return ids, None
    axes = np.tile(np.arange(len(ids), dtype=np.int32), (3, 1))
    wholes: tuple[Whole, ...] = ()
    if whole == "prompt":
        wholes = (Whole(0, len(ids), repr((ids, [one.image.digest for one in images])).encode()),)
    elif whole == "image":
        wholes = tuple(Whole(int(one.rows[0]), int(one.rows[-1]) + 1) for one in images)
    return ids, PromptMedia(images=tuple(images), axes=axes, delta=0, wholes=wholes)


@settings(max_examples=400)
@given(st.data())
def test_random_workloads_with_images(data: st.DataObject) -> None:
    draw = data.draw
    images = [image_of(name, draw(st.integers(1, 6))) for name in "abcd"]
    shape = draw(shapes())
    whole = draw(st.sampled_from([None, "image", "prompt"])) if STATE not in shape.spans else None
    parts = [
        draw(st.lists(st.one_of(st.integers(1, VOCAB - 1), st.sampled_from(images)), min_size=1, max_size=8))
        for _ in range(draw(st.integers(1, 6)))
    ]
    prompts = [prompt_with(own, whole=whole) for own in parts]
    if whole is not None:
        together = [len(ids) for ids, _ in prompts] if whole == "prompt" else [len(image.tokens) for image in images]
        batched = max(shape.max_num_batched_tokens, max(together) + shape.max_num_seqs)
        shape = replace(shape, max_num_batched_tokens=batched, drafts=0)
    length = max(len(ids) for ids, _ in prompts) + 8
    pages = -(-length // shape.page_size) + 2
    each = [
        max(count, needed(span, pages, shape.max_num_batched_tokens) + 2)
        for span, count in zip(shape.spans, shape.num_pages, strict=True)
    ]
    largest = max(image.num_rows for image in images)
    if whole == "prompt":
        largest = max(largest, *(sum(one.image.num_rows for one in media.images) for _, media in prompts if media), 0)
    shape = replace(
        shape,
        max_model_len=length,
        num_pages=tuple(each),
        media_rows=draw(st.integers(largest, 3 * largest)),
        wholes=whole is not None,
        encoder_budget=draw(st.integers(1, 2 * largest)),
        adapters=draw(st.integers(0, 2)),
    )
    named = [None, *(map(adaptation, "abc") if shape.adapters else ())]
    arrivals = []
    for number, (ids, media) in enumerate(prompts):
        asked = request(
            str(number),
            ids,
            n=draw(st.sampled_from([1, 1, 2])),
            max_tokens=draw(st.integers(1, 8)),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            media=media,
            adaptation=draw(st.sampled_from(named)),
        )
        at = draw(st.integers(0, 8))
        arrivals.append(Arrival(asked, at, draw(st.one_of(st.none(), st.integers(at, at + 15)))))
    engine = SimulatedEngine(shape)
    tokens = sum((len(a.request.prompt_token_ids) + a.request.max_tokens + 2) * a.request.params.n for a in arrivals)
    check_results(arrivals, run(engine, arrivals, max_steps=40 + 2 * tokens))
    check_idle(engine)


def needed(span: Span, longest: int, batched: int) -> int:
    """Number of tokens for which one sequence needs pages."""
    return span.window + batched if isinstance(span, LastTokens) else longest


@settings(max_examples=150)
@given(data=st.data())
@pytest.mark.slow
def test_prompts_that_go_on_find_room_behind_windows(data: st.DataObject) -> None:
    """Long prompts, each the one before it and more, over as few pages as one request needs: no plan is ever empty
    while nothing is in flight, and some sequence always makes progress."""
    page_size = data.draw(st.integers(1, 4))
    spans = data.draw(
        st.sampled_from([(ALL, W(8)), (ALL, W(16)), (W(12),), (W(4), W(20)), (ALL, W(3), W(17)), (ALL, W(8), STATE)])
    )
    seqs = data.draw(st.integers(1, 3))
    batched = max(seqs, data.draw(st.integers(1, 24)))
    longest = data.draw(st.integers(40, 120))
    spare = data.draw(st.integers(0, 6))
    shape = Shape(
        page_size=page_size,
        spans=spans,
        num_pages=tuple(
            1 + spare + 2 + (-(-needed(span, longest, batched) // page_size) if span != STATE else 0) for span in spans
        ),
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len=longest,
    )
    text = prompt_of(longest, data.draw(st.integers(0, 3)))
    lengths = sorted(data.draw(st.lists(st.integers(1, longest - 2), min_size=2, max_size=5)))
    arrivals = [
        Arrival(
            request(str(i), text[:length], max_tokens=data.draw(st.integers(1, min(8, longest - length)))),
            data.draw(st.integers(0, 40)),
        )
        for i, length in enumerate(lengths)
    ]
    engine = SimulatedEngine(shape)
    check_results(arrivals, run(engine, arrivals, max_steps=50 + 2 * sum(lengths) + 20 * len(lengths)))
    check_idle(engine)


@dataclass(frozen=True)
class Memory:
    """A recurrent mixer."""

    state: ClassVar[Recurrent] = Recurrent(recent=(1, 1), memory=(1, 1, 1))
    rope: ClassVar[None] = None


def attention(span: Span) -> Attention:
    window = span.window if isinstance(span, LastTokens) else None
    return Attention(heads=1, kv_heads=1, head_dim=1, scale=1.0, rope=None, window=window)


@settings(max_examples=150)
@given(data=st.data())
def test_the_longest_request_alone_comes_to_its_end(data: st.DataObject) -> None:
    """With any plan that ``plan_kv`` accepts, one request of ``max_model_len`` tokens can be computed."""
    spans = data.draw(
        st.sampled_from([(ALL,), (ALL, W(1)), (ALL, W(8)), (W(5),), (W(3), W(11)), (ALL, W(2), W(30)), (ALL, STATE)])
    )
    longest = data.draw(st.integers(2, 80))
    page_size = data.draw(st.integers(1, 7))
    model = ModelConfig(
        architecture="Test",
        vocab_size=VOCAB,
        hidden_size=1,
        layers=tuple(
            LayerSpec(
                mixer=Memory() if span == STATE else attention(span),
                feed_forward=GatedMLP(inner=1, activation="silu"),
                norm=RMS(1e-6),
            )
            for span in spans
        ),
        norm=RMS(1e-6),
        max_position=longest,
    )
    config = EngineConfig(
        page_size=page_size,
        max_num_seqs=data.draw(st.integers(1, 40)),
        max_num_batched_tokens=data.draw(st.integers(1, 40)),
        max_model_len=data.draw(st.sampled_from([None, longest])),
        kv_cache_memory_bytes=data.draw(st.integers(2, 40)) * len(spans) * 2 * page_size,
    )
    platform: Any = SimpleNamespace(is_cpu=True, is_cuda=False)
    try:
        plan = plan_kv(
            config, model, platform, layout=KVLayout(dtype=jnp.dtype(jnp.int8), page_size=page_size, token_scales=False)
        )
    except ConfigError as error:
        assert "raise kv_cache_memory_bytes" in str(error)
        return
    assert plan.max_model_len == longest or (config.max_model_len is None and plan.max_model_len < longest)
    assume(plan.max_model_len > 1)
    shape = Shape(
        page_size=page_size,
        spans=spans,
        num_pages=tuple(group.num_pages for group in plan.groups),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_seqs, config.max_num_batched_tokens),
        max_model_len=plan.max_model_len,
    )
    prompt = prompt_of(data.draw(st.integers(1, plan.max_model_len - 1)))
    arrivals = [Arrival(request("a", prompt, max_tokens=plan.max_model_len - len(prompt)), 0)]
    engine = SimulatedEngine(shape)
    check_results(arrivals, run(engine, arrivals, max_steps=plan.max_model_len + 3))
    assert engine.totals.preemptions == 0


PLAIN = Shape(page_size=4, spans=(ALL,), num_pages=(41,), max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rest = random.Random(seed)
    return [rest.randrange(VOCAB) for _ in range(length)]


def test_out_of_pages_preempts_the_newest_and_changes_no_token() -> None:
    shape = Shape(
        page_size=4, spans=(ALL,), num_pages=(9,), max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32
    )
    engine = SimulatedEngine(shape)
    arrivals = [Arrival(request(str(i), prompt_of(6, i), max_tokens=20), 0) for i in range(4)]
    preempted: Counter[str] = Counter()
    first_done: list[str] = []
    for arrival in arrivals:
        engine.add(arrival.request)
    sequences = [s for group in engine._sequences.values() for s in group]
    while not engine.idle:
        first_done += [output.request_id for output in engine.step() if output.finish_reason]
        engine.check()
    for sequence in sequences:
        preempted[sequence.request.request_id] = sequence.times.num_preemptions
        assert sequence.tokens[6:] == alone(prompt_of(6, int(sequence.request.request_id)), 3, 20, frozenset())
    assert first_done == ["0", "1", "2", "3"]
    assert preempted["0"] == 0
    assert preempted["3"] > 0
    assert engine.totals.preemptions == sum(preempted.values())


def sequences_of(*lengths: int) -> list[Sequence]:
    """Sequences with prompts of these lengths, in the order in which they came."""
    return [
        Sequence(
            request=request(str(order), prompt_of(length, order), max_tokens=16),
            index=0,
            order=order,
            seed=0,
            tokens=prompt_of(length, order),
            times=SequenceTimes(arrival=0),
        )
        for order, length in enumerate(lengths)
    ]


def test_tokens_of_a_preempted_sequence_are_left_to_the_others() -> None:
    """Grammars force several tokens of two sequences; the first one needs the page of the third, which decodes."""
    shape = Shape(
        page_size=8, spans=(ALL,), num_pages=(4,), max_num_seqs=3, max_num_batched_tokens=10, max_model_len=24
    )
    scheduler = SimulatedEngine(shape).scheduler
    first, second, third = sequences = sequences_of(8, 1, 1)
    for sequence in sequences:
        scheduler.add(sequence)
    assert scheduler.plan().admitted == sequences
    for sequence, count in ((first, 8), (second, 5), (third, 1)):
        sequence.tokens += [0] * count
    plan = scheduler.plan()
    assert plan.num_preempted == third.times.num_preemptions == 1
    # The third one's token was planned before it was preempted: of the budget of 10, the second one has it now.
    assert [(row.sequence, row.count) for row in plan.rows] == [(first, 8), (second, 2)]


def test_a_prompt_that_is_not_to_be_cut_waits_for_a_step_that_holds_it() -> None:
    whole = Scheduler(SimulatedEngine(PLAIN).kv, max_num_seqs=4, max_num_batched_tokens=16, whole_prompts=True)
    cut = Scheduler(SimulatedEngine(PLAIN).kv, max_num_seqs=4, max_num_batched_tokens=16)
    planned = {}
    for scheduler in (whole, cut):
        for sequence in sequences_of(10, 7, 9):
            scheduler.add(sequence)
        planned[scheduler] = [[row.count for row in scheduler.plan().rows] for _ in range(2)]
    assert planned == {whole: [[10], [7, 9]], cut: [[10, 6], [1, 9]]}


def test_priorities_order_the_queue() -> None:
    shape = Shape(
        page_size=4, spans=(ALL,), num_pages=(41,), max_num_seqs=1, max_num_batched_tokens=16, max_model_len=32
    )
    engine = SimulatedEngine(shape)
    for name, priority in (("low", 5), ("high", -5), ("middle", 0)):
        engine.add(request(name, prompt_of(3), max_tokens=2, priority=priority))
    order = []
    while not engine.idle:
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order == ["high", "middle", "low"]


def test_who_has_the_least_priority_gives_way_and_not_who_came_in_last() -> None:
    engine = SimulatedEngine(replace(PLAIN, num_pages=(9,)))
    engine.add(request("low", prompt_of(6), max_tokens=20, priority=1))
    engine.step()
    engine.add(request("high", prompt_of(6, 1), max_tokens=20))
    (low,), (high,) = engine._sequences["low"], engine._sequences["high"]
    ended = []
    while not engine.idle:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["high", "low"]
    assert (low.times.num_preemptions, high.times.num_preemptions) == (1, 0)


def test_continuations_share_the_prompt() -> None:
    engine = SimulatedEngine(PLAIN)
    engine.add(request("a", prompt_of(9), n=4, max_tokens=3))
    engine.step()
    assert engine.totals.steps == 0  # nothing has been read yet
    assert engine.kv_stats().used == 2 + 4  # two full pages for all, and for each the one with its ninth token
    engine.check()


def test_second_request_computes_only_what_is_new() -> None:
    engine = SimulatedEngine(PLAIN)
    prompt = prompt_of(14)
    run(engine, [Arrival(request("a", prompt, max_tokens=6), 0)], max_steps=50)
    before = engine.totals.prompt_tokens
    output = run(engine, [Arrival(request("b", prompt, max_tokens=6), 0)], max_steps=50)
    assert output["b", 0].tokens == alone(prompt, 3, 6, frozenset())
    assert engine.totals.prompt_tokens - before == 14 - 12
    assert engine.totals.prefix_cache_hits == 12
    assert engine.totals.prefix_cache_queries == 28


def test_generated_tokens_are_found_again() -> None:
    engine = SimulatedEngine(PLAIN)
    first = run(engine, [Arrival(request("a", prompt_of(6), max_tokens=11), 0)], max_steps=50)["a", 0].tokens
    longer = prompt_of(6) + first
    run(engine, [Arrival(request("b", longer, max_tokens=1), 0)], max_steps=50)
    assert engine.totals.prefix_cache_hits >= 12


@pytest.mark.parametrize("length", [6, 8])
def test_pages_of_a_sequence_that_runs_are_found_as_soon_as_they_are_full(length: int) -> None:
    engine = SimulatedEngine(PLAIN)
    prompt = prompt_of(5)
    engine.add(request("a", prompt, max_tokens=20))
    (running,) = engine._sequences["a"]
    while len(running.tokens) < length:
        engine.step()
    engine.add(request("b", [*running.tokens[:length], 0], max_tokens=1))
    (later,) = engine._sequences["b"]
    engine.step()
    assert later.num_cached_tokens == length // 4 * 4
    assert len(running.tokens) < length + 4  # no page of it has become full meanwhile


@pytest.mark.parametrize(("salts", "hits"), [((None, None), 8), (("x", "x"), 8), (("x", "y"), 0), ((None, "x"), 0)])
def test_salts_keep_prefixes_apart(salts: tuple[str | None, str | None], hits: int) -> None:
    engine = SimulatedEngine(PLAIN)
    for name, salt in zip("ab", salts, strict=True):
        run(engine, [Arrival(request(name, prompt_of(10), max_tokens=2, cache_salt=salt), 0)], max_steps=50)
    assert engine.totals.prefix_cache_hits == hits


def test_salt_may_be_any_json_string() -> None:
    engine = SimulatedEngine(PLAIN)
    lone_surrogate = request("a", prompt_of(10), max_tokens=2, cache_salt="\ud800")
    assert run(engine, [Arrival(lone_surrogate, 0)], max_steps=50)["a", 0].reason == "length"


def test_without_prefix_caching_requests_share_nothing_and_continuations_do() -> None:
    shape = Shape(
        page_size=4,
        spans=(ALL,),
        num_pages=(41,),
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        share_prefixes=False,
    )
    engine = SimulatedEngine(shape)
    for name in "\ud800b":
        run(engine, [Arrival(request(name, prompt_of(10), n=2, max_tokens=2), 0)], max_steps=50)
    assert engine.totals.prefix_cache_hits == 2 * 8  # the second continuation of each


def test_prefix_hit_needs_every_page_that_a_window_sees() -> None:
    shape = Shape(
        page_size=2,
        spans=(ALL, LastTokens(4)),
        num_pages=(33, 8),
        max_num_seqs=2,
        max_num_batched_tokens=4,
        max_model_len=32,
    )
    engine = SimulatedEngine(shape)
    prompt = prompt_of(16)
    run(engine, [Arrival(request("a", prompt, max_tokens=1), 0)], max_steps=50)
    # Other text evicts the window group's pages, of which there are few, and none of the full group's.
    run(engine, [Arrival(request("b", prompt_of(14, 5), max_tokens=1), 0)], max_steps=50)
    assert run(engine, [Arrival(request("c", prompt, max_tokens=4), 0)], max_steps=50)["c", 0].tokens == alone(
        prompt, 3, 4, frozenset()
    )
    assert engine.totals.prefix_cache_hits == 0


def test_a_prefix_that_fills_the_window_does_not_keep_its_own_request_waiting() -> None:
    """The window's pages go back as the request gets on, so a whole window beside them is not needed."""
    shape = Shape(
        page_size=2,
        spans=(ALL, LastTokens(16)),
        num_pages=(65, 15),
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=128,
    )
    engine = SimulatedEngine(shape)
    prompt = prompt_of(100)
    run(engine, [Arrival(request("a", prompt[:50], max_tokens=1), 0)], max_steps=20)
    output = run(engine, [Arrival(request("b", prompt, max_tokens=3), 0)], max_steps=20)
    assert output["b", 0].tokens == alone(prompt, 3, 3, frozenset())
    assert engine.totals.prefix_cache_hits == 50


def test_a_plan_without_anything_while_requests_wait_is_an_error() -> None:
    engine = SimulatedEngine(PLAIN)
    engine.add(request("a", prompt_of(20), max_tokens=2))
    for pool in engine.kv.pools:
        pool.allocate(pool.available)  # nobody's, so nobody gives them back
    with pytest.raises(LLMJaxError, match="nothing can be computed for 0 running and 1 waiting sequences"):
        engine.step()


def test_a_request_that_does_not_fit_is_not_looked_up_at_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine(replace(PLAIN, num_pages=(9,)))
    attach, walked = engine.kv.attach_prefix, []

    def counted(sequence: Any) -> int:
        walked.append(sequence.request.request_id)
        return attach(sequence)

    monkeypatch.setattr(engine.kv, "attach_prefix", counted)
    engine.add(request("a", prompt_of(8), max_tokens=20))
    engine.add(request("b", prompt_of(28, 1), max_tokens=2))
    ended = []
    while not engine.idle:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["a", "b"]
    assert walked == ["a", "b", "b"]  # once in vain, and again when "a" has left


def test_a_request_that_does_not_fit_is_looked_up_again_when_more_of_its_prompt_is_known() -> None:
    engine = SimulatedEngine(replace(PLAIN, num_pages=(11,), max_num_batched_tokens=4))
    prompt = prompt_of(24)
    engine.add(request("a", prompt, max_tokens=8))
    engine.add(request("b", prompt, max_tokens=2))
    ended = []
    while not engine.idle:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
        engine.check()
    assert ended == ["b", "a"]  # "b" shares what "a" has computed, and runs beside it


def test_windows_hold_no_more_pages_than_they_need() -> None:
    shape = Shape(
        page_size=2,
        spans=(ALL, LastTokens(5)),
        num_pages=(33, 33),
        max_num_seqs=1,
        max_num_batched_tokens=4,
        max_model_len=60,
    )
    engine = SimulatedEngine(shape)
    engine.add(request("a", prompt_of(20), max_tokens=30))
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.kv.pools[1].used)
    assert most <= (5 + 4) // 2 + 2


@pytest.mark.parametrize(("page_size", "window"), [(2, 5), (4, 6), (8, 6)])
def test_while_a_sequence_decodes_pages_behind_the_window_are_given_back_at_once(page_size: int, window: int) -> None:
    shape = replace(PLAIN, page_size=page_size, spans=(ALL, LastTokens(window)), num_pages=(33, 33))
    engine = SimulatedEngine(shape)
    engine.add(request("a", prompt_of(9), max_tokens=20))
    (sequence,) = engine._sequences["a"]
    engine.step()
    steps = 0
    while not engine.idle:
        engine.step()
        if engine.scheduler.running:
            last, steps = sequence.num_computed - 1, steps + 1
            assert engine.kv.pools[1].used == last // page_size - (last - window + 1) // page_size + 1
    assert steps == 19


def test_abort_in_every_state() -> None:
    engine = SimulatedEngine(PLAIN)
    for i in range(6):
        engine.add(request(str(i), prompt_of(9, i), max_tokens=5))
    assert [o.finish_reason for o in engine.abort("5")] == ["abort"]  # waiting, before any step
    engine.step()
    assert [o.finish_reason for o in engine.abort("0")] == ["abort"]  # its first tokens are in flight
    assert [o.finish_reason for o in engine.abort("4")] == ["abort"]  # still waiting
    assert engine.abort("0") == []
    assert engine.abort("unknown") == []
    ended = []
    while not engine.idle:
        ended += [o.request_id for o in engine.step() if o.finish_reason]
        engine.check()
    assert sorted(ended) == ["1", "2", "3"]
    check_idle(engine)


def test_abort_of_one_continuation_leaves_the_others() -> None:
    engine = SimulatedEngine(PLAIN)
    engine.add(request("a", prompt_of(9), n=3, max_tokens=5))
    engine.step()
    assert [(o.index, o.finish_reason) for o in engine.abort("a", 1)] == [(1, "abort")]
    ended = []
    while not engine.idle:
        ended += [o.index for o in engine.step() if o.finish_reason]
    assert ended == [0, 2]
    check_idle(engine)


MANY = replace(PLAIN, decode_steps=8)


def steps_of(engine: SimulatedEngine) -> list[int]:
    """Runs to the end; the steps of each dispatch that was read."""
    taken, before = [], 0
    while not engine.idle:
        engine.step()
        engine.check()
        if engine.totals.steps > before:
            taken.append(engine.totals.steps - before)
        before = engine.totals.steps
    return taken


def test_undisturbed_decodes_take_more_and_more_steps_in_a_dispatch() -> None:
    engine = SimulatedEngine(MANY)
    engine.add(request("a", prompt_of(4), max_tokens=28))
    # Each doubling shows in the plan after the next, because two dispatches are under way.
    assert steps_of(engine) == [1, 1, 1, 2, 2, 4, 4, 8, 5]
    assert engine.totals.generation_tokens == 28


def test_a_newcomer_ends_long_dispatches() -> None:
    engine = SimulatedEngine(MANY)
    engine.add(request("a", prompt_of(4), max_tokens=28))
    while engine.totals.steps < 6:
        engine.step()
    engine.add(request("b", prompt_of(4, 1), max_tokens=4))
    engine.step()
    assert engine._pending is not None
    assert [row.sequence.request.request_id for row in engine._pending.plan.rows] == ["a", "b"]
    assert engine._pending.plan.steps == 1


def test_prompts_come_in_smaller_chunks_where_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkPace, "tokens", 6)
    engine = SimulatedEngine(replace(MANY, max_num_batched_tokens=32))
    engine.add(request("a", prompt_of(20), max_tokens=8))
    engine.step()
    assert engine._pending is not None
    assert [row.count for row in engine._pending.plan.rows] == [20]  # nobody waits for it
    while engine.totals.generation_tokens < 2:
        engine.step()
    engine.add(request("b", prompt_of(24, 1), max_tokens=4))
    counts = []
    while not engine.idle:
        engine.step()
        counts += [] if engine._pending is None else [[row.count for row in engine._pending.plan.rows]]
    assert [count for count in counts if sum(count) > 2] == [[1, LEAST_CHUNK], [1, 24 - LEAST_CHUNK]]
    assert engine.totals.generation_tokens == 12


def test_full_slots_wait_for_the_first_that_ends() -> None:
    engine = SimulatedEngine(replace(MANY, max_num_seqs=2))
    for name, count in (("a", 28), ("b", 20), ("c", 5)):
        engine.add(request(name, prompt_of(4), max_tokens=count))
    order, longest = [], 0
    while not engine.idle:
        if engine._pending is not None and engine.scheduler.num_waiting:
            longest = max(longest, engine._pending.plan.steps)
            for row in engine._pending.plan.rows:
                assert engine._pending.plan.steps <= row.steps
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert longest > 1
    assert order == ["b", "c", "a"] or order == ["b", "a", "c"]


def test_a_row_that_ends_on_the_device_computes_nothing_more() -> None:
    engine = SimulatedEngine(MANY)
    prompts = [prompt_of(4, i) for i in range(40)]
    ends = [len(alone(prompt, 3, 28, frozenset({STOP}))) for prompt in prompts]
    late = prompts[next(i for i, end in enumerate(ends) if 8 <= end <= 11)]
    engine.add(request("a", late, max_tokens=28, stop_token_ids=frozenset({STOP})))
    expected = len(alone(late, 3, 28, frozenset({STOP})))
    assert sum(steps_of(engine)) == expected
    assert engine.totals.generation_tokens == expected
    assert sum(map(len, engine.runner.content)) == 4 + expected - 1


def test_stop_strings_get_tokens_one_by_one() -> None:
    engine = SimulatedEngine(MANY)
    engine.add(request("a", prompt_of(4), max_tokens=28, stop="x"))
    engine.add(request("b", prompt_of(4, 1), max_tokens=28))
    most: Counter[str] = Counter()
    while not engine.idle:
        for output in engine.step():
            most[output.request_id] = max(most[output.request_id], len(output.new_token_ids))
    assert most == {"a": 1, "b": 8}


DRAFTED = replace(PLAIN, drafts=4, max_num_batched_tokens=20)


def test_drafts_bring_several_tokens_a_step() -> None:
    engine = SimulatedEngine(replace(DRAFTED, max_model_len=64))
    engine._speculation._length = lambda found, rows, most: most  # type: ignore[method-assign, union-attr]
    results = run(engine, [Arrival(request("a", [0] * 12, max_tokens=40), 0)], max_steps=60)
    assert results["a", 0].tokens == alone([0] * 12, 3, 40, frozenset())
    totals = engine.totals
    assert totals.draft_tokens > 40
    assert 0 < totals.accepted_tokens < totals.draft_tokens
    assert totals.generation_tokens == 40
    assert totals.steps <= 1 + 39 - totals.accepted_tokens + 1  # what was accepted took no step


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_drafts_stay_within_max_tokens_and_pages(max_tokens: int) -> None:
    shape = replace(DRAFTED, num_pages=(5,), max_num_seqs=1, max_model_len=16)
    engine = SimulatedEngine(shape)
    prompt = [1, 2] * 5 + [1]
    results = run(engine, [Arrival(request("a", prompt, max_tokens=max_tokens), 0)], max_steps=20)
    assert results["a", 0].tokens == alone(prompt, 3, max_tokens, frozenset())
    check_idle(engine)


def test_too_few_pages_for_many_steps_are_enough_for_one() -> None:
    engine = SimulatedEngine(replace(MANY, page_size=2, num_pages=(17,)))
    arrivals = [Arrival(request(str(i), prompt_of(4, i), max_tokens=12), 0) for i in range(2)]
    check_results(arrivals, run(engine, arrivals, max_steps=60))
    assert engine.totals.preemptions == 0


@pytest.mark.parametrize("spans", [(ALL,), (ALL, W(3)), (W(6), STATE)], ids=str)
def test_steps_may_bring_fewer_tokens_than_planned(spans: tuple[Span, ...]) -> None:
    """The host plans for the most tokens and takes what comes: every dispatch brings some, and no sequence stalls."""
    engine = SimulatedEngine(replace(MANY, spans=spans, num_pages=(41,) * len(spans), leave_early=True))
    for i in range(3):
        engine.add(request(str(i), prompt_of(4, i), max_tokens=28))
    short = 0
    while not engine.idle:
        engine.step()
        engine.check()
        for sequence in engine.scheduler.running:
            certain = len(sequence.tokens) - 1
            assert certain <= sequence.num_computed <= certain + max(1, sequence.in_flight)
            short += engine.runner.length[sequence.slot] < sequence.num_computed
    assert short > 3
    assert engine.totals.generation_tokens == 3 * 28
    assert engine.totals.preemptions == 0
    assert [engine.runner.history[str(i), 0][4:] for i in range(3)] == [
        alone(prompt_of(4, i), 3, 28, frozenset()) for i in range(3)
    ]


HYBRID = replace(PLAIN, spans=(ALL, STATE), num_pages=(41, 25), max_model_len=64)


def hits(engine: SimulatedEngine, name: str, prompt: list[int], **options: Any) -> int:
    """Runs a request to its end and returns how many of its tokens were found."""
    before = engine.totals.prefix_cache_hits
    options.setdefault("max_tokens", 1)
    results = run(engine, [Arrival(request(name, prompt, **options), 0)], max_steps=80)
    for index in range(options.get("n", 1)):
        assert results[name, index].tokens == alone(prompt, 3 + index, options["max_tokens"], frozenset())
    return engine.totals.prefix_cache_hits - before


@pytest.mark.parametrize(("length", "found"), [(14, 12), (16, 12), (17, 16), (4, 0), (5, 4)])
def test_a_recurrent_state_is_found_at_the_last_full_page_of_a_prompt(length: int, found: int) -> None:
    engine = SimulatedEngine(HYBRID)
    prompt = prompt_of(length)
    assert hits(engine, "a", prompt) == 0
    assert hits(engine, "b", prompt) == found


def test_recurrent_states_are_found_at_the_ends_of_chunks() -> None:
    engine = SimulatedEngine(HYBRID)  # chunks of 16 tokens
    prompt = prompt_of(46)
    assert hits(engine, "a", prompt) == 0
    assert hits(engine, "b", [*prompt[:39], 0, 1]) == 32
    assert hits(engine, "c", [*prompt[:31], 0, 1]) == 28  # the page before the end of a chunk
    assert hits(engine, "d", [*prompt[:24], 0, 1]) == 16
    assert hits(engine, "e", [*prompt[:15], 0, 1]) == 12


@pytest.mark.parametrize("decode_steps", [1, 8])
def test_a_recurrent_state_is_found_at_the_last_full_page_of_an_output(decode_steps: int) -> None:
    engine = SimulatedEngine(replace(HYBRID, decode_steps=decode_steps))
    prompt = prompt_of(6)
    text = prompt + alone(prompt, 3, 43, frozenset())
    assert hits(engine, "a", prompt, max_tokens=43) == 0
    # At the end of the prompt's full page, and the latest: the last token was sampled and not computed.
    assert engine.kv.groups[1].pool.cached == 2
    assert hits(engine, "b", [*text, 0, 1]) == 48


def test_continuations_wait_for_the_state_at_the_end_of_their_prompt() -> None:
    engine = SimulatedEngine(HYBRID)
    assert hits(engine, "a", prompt_of(9), n=4, max_tokens=3) == 3 * 8
    assert engine.totals.prompt_tokens == 9 + 3


def test_a_prompt_that_is_being_computed_is_not_computed_beside_it() -> None:
    engine = SimulatedEngine(replace(HYBRID, num_pages=(41, 41)))
    prompt = prompt_of(46)
    arrivals = [Arrival(request(name, prompt, max_tokens=2), at) for name, at in (("a", 0), ("b", 1))]
    check_results(arrivals, run(engine, arrivals, max_steps=20))
    assert engine.totals.prefix_cache_hits == 44
    assert engine.totals.prompt_tokens == 46 + 2


def test_a_preempted_sequence_goes_on_from_its_last_snapshot() -> None:
    engine = SimulatedEngine(replace(HYBRID, num_pages=(12, 25)))
    arrivals = [Arrival(request(str(i), prompt_of(8, i), max_tokens=24), 0) for i in range(2)]
    check_results(arrivals, run(engine, arrivals, max_steps=80))
    assert engine.totals.preemptions > 0
    # Both prompts, and less than a page after each preemption.
    computed = engine.totals.prompt_tokens + engine.totals.generation_tokens
    assert computed <= 2 * (8 + 24) + engine.totals.preemptions * 4


def test_two_states_are_enough_for_one_sequence_and_no_more() -> None:
    engine = SimulatedEngine(replace(HYBRID, num_pages=(41, 3)))
    arrivals = [Arrival(request(str(i), prompt_of(20, i), max_tokens=20), 0) for i in range(2)]
    check_results(arrivals, run(engine, arrivals, max_steps=80))
    assert engine.totals.preemptions == 0  # the second waits


def test_the_state_that_the_next_token_reads_is_not_given_back() -> None:
    states = StateSlots(GroupSpec(span=STATE, num_pages=3), page_size=4, num_slots=1, pages_per_sequence=4)
    tokens = prompt_of(16)
    sequence = Sequence(
        request=request("a", tokens, max_tokens=1),
        index=0,
        order=0,
        seed=0,
        tokens=tokens,
        times=SequenceTimes(arrival=0),
        slot=0,
    )
    states.attach(sequence, [])
    before: list[int] = []
    for end in range(1, 17):
        states.trim(sequence)
        states.reserve(sequence, end)
        now = int(states.table[0, (end - 1) // 4])
        if end % 4 == 1:  # the first token of a page reads the entry of the page before, and writes another one
            assert list(states.held(sequence)) == [*before, now] and now not in before
        else:
            assert list(states.held(sequence)) == [now] == before
        before = [now]
        sequence.num_computed, sequence.num_committed = end, end // 4
    states.release(sequence)
    assert states.pool.used == 0


def test_snapshots_that_nobody_has_used_for_longest_are_given_up() -> None:
    engine = SimulatedEngine(replace(HYBRID, num_pages=(81, 9)))
    prompts = [prompt_of(10, seed) for seed in range(4)]
    for i, prompt in enumerate(prompts):
        hits(engine, str(i), prompt)
    assert hits(engine, "again", prompts[0]) == 8
    for seed in range(10, 17):
        hits(engine, str(seed), prompt_of(10, seed))
    assert hits(engine, "old", prompts[1]) == 0
    assert hits(engine, "new", prompt_of(10, 16)) == 8
    assert engine.kv.groups[0].pool.free > 0  # pages of keys alone are not a prefix


def test_nothing_of_a_failed_sequence_is_found() -> None:
    """Not even what it freed while it ran is found: states of earlier pages, KV entries outside a window."""
    for spans, pages in (((ALL, STATE), (41, 25)), ((W(8),), (41,)), ((STATE,), (25,))):
        engine = SimulatedEngine(replace(HYBRID, spans=spans, num_pages=pages))
        prompt = prompt_of(46)
        engine.add(request("a", prompt, max_tokens=9))
        for _ in range(8):
            engine.step()
        (sequence,) = engine.scheduler.running
        engine.kv.forget(sequence)
        engine.abort("a")
        assert engine.kv_stats().cached == 0
        while not engine.idle:
            engine.step()
        assert hits(engine, "b", prompt) == 0
