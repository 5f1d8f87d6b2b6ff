"""A step's metadata as one int32 array: packed on the host, sent in one transfer, unpacked inside the jitted step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.arrays import Ints
from llmjax.engine.core.layer_states import TableChanges
from llmjax.engine.core.media_rows import MediaRows
from llmjax.engine.core.scheduler import Row, StepPlan
from llmjax.engine.device.media import MediaBatch, MediaShape, pack_media, part_shapes
from llmjax.engine.device.rows import ENDED, ROW_WORDS, NewRow, RowChanges, RowState
from llmjax.kernels.attention import RaggedBatch
from llmjax.speculative import draft_lengths

READ_DEVICE = -1  # in ``tokens``: the input is the slot's last sampled token


@dataclass(frozen=True)
class Bucket:
    """A static shape of the step: padded tokens and rows. In the decode family every row is one token; in the drafted
    one it is a token and the drafts after it."""

    tokens: int
    rows: int
    decode: bool
    steps: int = 1  # steps that one dispatch may take; more than 1 only in the decode family
    drafts: int = 0  # drafts of a row; more than 0 only in the drafted family, which no other plan can use
    spans: bool = False  # tokens of images may see later ones, for which attention has other kernels
    adapters: bool = False  # rows may have adapters, whose products take time even where no row has one

    def holds(self, plan: StepPlan) -> bool:
        if len(plan.rows) > self.rows or plan.num_tokens > self.tokens:
            return False
        if (plan.spans and not self.spans) or (plan.adapters and not self.adapters):
            return False
        if self.drafts or plan.drafts:
            return plan.drafts <= self.drafts and plan.drafts > 0
        return plan.steps <= self.steps and (plan.decode_only or not self.decode)

    def cost(self) -> tuple[int, bool, bool, bool, bool]:
        """A key to sort by: decode before mixed at equal size; the largest mixed bucket is last."""
        return (self.tokens, not self.decode, not self.drafts, self.spans, self.adapters)


def make_buckets(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    decode_steps: int = 1,
    generates: bool = True,
    drafts: int = 0,
    drafted_rows: int = 0,
    spans: bool = False,
    adapters: bool = False,
) -> list[Bucket]:
    """Mixed buckets of 16, 32, … tokens with all rows. Models that generate also have decode buckets of 1, 2, 4, …
    rows, and, if there are drafts, drafted buckets of these rows for each number of drafts. Other models have only
    mixed steps, often of one short text, so they also have buckets of 8, 24 and 48 tokens.

    Args:
        generates: whether the model generates.
        drafts: most drafts of a row.
        drafted_rows: most rows of a step with drafts.
        spans: whether there are images whose tokens see one another; steps with them have mixed buckets of their own.
        adapters: whether rows may have adapters; steps with such rows have buckets of their own.
    """
    decode = [Bucket(tokens=n, rows=n, decode=True, steps=decode_steps) for n in _doubling(1, max_num_seqs)]
    sizes = _doubling(16, max_num_batched_tokens)
    if not generates:
        sizes = sorted({*sizes, *(size for size in (8, 24, 48) if size < max_num_batched_tokens)})
    mixed = [Bucket(tokens=n, rows=max_num_seqs, decode=False) for n in sizes]
    mixed += [replace(bucket, spans=True) for bucket in mixed if spans]
    drafted = [
        Bucket(tokens=n * (1 + length), rows=n, decode=False, drafts=length)
        for length in (draft_lengths(drafts) if drafted_rows else ())
        for n in _doubling(1, min(drafted_rows, max_num_seqs))
        if n * (1 + length) <= max_num_batched_tokens
    ]
    buckets = decode + mixed + drafted if generates else mixed
    return buckets + [replace(bucket, adapters=True) for bucket in buckets if adapters]


def _doubling(first: int, last: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """The batch inside the step, on the device. Dimensions as in ``llmjax.kernels.attention``; G is KV groups."""

    tokens: jax.Array  # i32 [T], the model's inputs; ENDED where there is none
    query_start: jax.Array  # i32 [R + 1]
    kv_len: jax.Array  # i32 [R]
    slot: jax.Array  # i32 [R]; padding rows have num_slots: read clamped, writes dropped
    steps: jax.Array  # i32 [R], tokens to sample one after another; 0 in the middle of a prompt
    prompt_len: jax.Array  # i32 [R]
    second_start: jax.Array  # i32 [R], where the second text of a pair begins
    page_tables: tuple[jax.Array, ...]  # G × i32 [R, P]
    targets: jax.Array | None  # i32 [T], the prompt token after each token; None except in the mixed family
    any_prompt_logprobs: jax.Array  # bool []
    waits: jax.Array  # bool []: tokens are sampled by another dispatch, after this one
    decode: bool = field(metadata={"static": True})  # T == R and token r is row r's only one
    verify: bool = field(default=False, metadata={"static": True})  # tokens after a row's first one are drafts
    media: MediaBatch | None = None  # images among the tokens; None: there can be none

    @property
    def row(self) -> jax.Array:
        """i32 [T]: the row of each token. Padding has row R - 1."""
        return _row_of_token(self.query_start, self.tokens, decode=self.decode)

    @property
    def last(self) -> jax.Array:
        """i32 [R]: place of each row's last token."""
        return jnp.maximum(self.query_start[1:] - 1, 0)

    @property
    def last_tokens(self) -> jax.Array:
        """i32 [R]: the rows' last inputs."""
        return self.tokens if self.decode else self.tokens[self.last]

    def after(self, done: jax.Array, rows: RowState) -> StepBatch:
        """The next step of a dispatch of the decode family: rows that have ended or have their tokens are padding.

        Args:
            done: i32 [], steps taken.
            rows: the state of rows after those steps.
        """
        tokens = jnp.where(done == 0, self.tokens, rows.last_token[self.slot])
        alive = (self.kv_len > 0) & (tokens != ENDED) & (done < jnp.maximum(self.steps, 1))
        return replace(
            self,
            tokens=tokens,
            kv_len=jnp.where(alive, rows.length[self.slot] + 1, 0),
            steps=jnp.where(alive, jnp.maximum(self.steps - done, 0), 0),
        )

    def ragged(self, *, page_size: int) -> tuple[jax.Array, jax.Array, tuple[RaggedBatch, ...]]:
        """Row and position of every token (i32 [T] each), and the batch as each group's attention sees it.

        Padding tokens get row R - 1 and a position past its end; they write to the dummy page.
        """
        row = self.row
        if self.decode:
            position = jnp.maximum(self.kv_len - 1, 0)
            real = self.kv_len > 0
        else:
            index = jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
            real = index < self.query_start[-1]
            position = jnp.where(real, index - self.query_start[row + 1] + self.kv_len[row], 0)
        page, offset = position // page_size, position % page_size

        def group(table: jax.Array) -> RaggedBatch:
            kv_index = jnp.where(real, table[row, page] * page_size + offset, 0)
            return RaggedBatch(
                query_start=self.query_start,
                kv_len=self.kv_len,
                page_table=table,
                kv_index=kv_index,
                decode=self.decode,
                verify=self.verify,
            )

        return row, position, tuple(group(table) for table in self.page_tables)


def _row_of_token(query_start: jax.Array, tokens: jax.Array, *, decode: bool) -> jax.Array:
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    if decode:
        return index
    # Comparing all is one kernel; a binary search is a loop, which the host may have to control on an accelerator.
    row = jnp.searchsorted(query_start, index, side="right", method="compare_all").astype(jnp.int32) - 1
    return jnp.minimum(row, query_start.shape[0] - 2)


@dataclass(frozen=True)
class BatchLayout:
    """The place of each field of a bucket's batch in the packed array.

    Args:
        num_slots: sequences that may run at once.
        pages_per_sequence: width P of a page table.
        num_groups: KV groups.
        media: what the batches of a model that sees have beside those of others; None: it sees nothing.
    """

    bucket: Bucket
    num_slots: int
    pages_per_sequence: int
    num_groups: int
    media: MediaShape | None = None

    @property
    def room(self) -> int:
        """Page table entries that a batch can change: in each group, for each row, one that is freed and one that is
        new; and those of chunks."""
        chunks = 0 if self.bucket.decode else self.bucket.tokens // 8
        return self.num_groups * (2 * self.bucket.rows + chunks)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        tokens, rows = self.bucket.tokens, self.bucket.rows
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (tokens,),
            "query_start": (rows + 1,),
            "slot": (rows,),
            "steps": (rows,),
            "new_slot": (rows,),
            "new_length": (rows,),
            "new_words": (rows, ROW_WORDS),
            "entry": (self.room,),
            "page": (self.room,),
            "prompt_logprobs": (1,),
            "waits": (1,),
        }
        if not self.bucket.decode and not self.bucket.drafts:
            shapes["targets"] = (tokens,)
        if self.media is not None:
            images = "targets" in shapes and (self.bucket.spans or not self.media.whole)
            shapes |= part_shapes(self.media, tokens=tokens, rows=rows, images=images)
        return shapes

    @cached_property
    def _places(self) -> dict[str, slice]:
        places, end = {}, 0
        for name, shape in self.shapes.items():
            places[name] = slice(end, end + prod(shape))
            end += prod(shape)
        return places

    @cached_property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @cached_property
    def _empty(self) -> Ints:
        """The packed array of a plan without rows."""
        packed = np.zeros(self.size, np.int32)
        parts = self.parts(packed)
        parts["slot"][:] = parts["new_slot"][:] = self.num_slots
        parts["entry"][:] = self.num_groups * self.num_slots * self.pages_per_sequence
        for name in parts:
            if name.startswith("media_"):
                parts[name][:] = -1
        return packed

    def parts(self, packed: Ints) -> dict[str, Ints]:
        """Views of a packed batch, by field."""
        return {name: packed[place].reshape(self.shapes[name]) for name, place in self._places.items()}

    def pack(self, plan: StepPlan, *, new: list[NewRow], tables: TableChanges, media: MediaRows | None = None) -> Ints:
        """The packed batch of a plan.

        Args:
            new: the rows whose slot has got another sequence.
            tables: at most ``room`` changes.
            media: where the rows of the plan's images are; None: it has none.

        Returns:
            i32 [size]; a new array every time, because the device may read it in place.
        """
        packed = self._empty.copy()
        part = self.parts(packed)
        rows, count = plan.rows, len(plan.rows)
        if self.bucket.decode:
            part["tokens"][:count] = [
                READ_DEVICE if row.reads_device else row.sequence.tokens[row.start] for row in rows
            ]
            part["query_start"][: count + 1] = range(count + 1)
            part["query_start"][count + 1 :] = count
        else:
            self._pack_tokens(part, rows)
        if media is not None and "media_places" in part:
            pack_media(part, rows, media)
        part["slot"][:count] = [row.sequence.slot for row in rows]
        part["waits"][0] = plan.waits
        part["steps"][:count] = [row.steps if row.samples else 0 for row in rows]
        for i, new_row in enumerate(new):
            part["new_slot"][i], part["new_length"][i] = new_row.slot, new_row.length
            part["new_words"][i] = new_row.words
            if "new_delta" in part:
                part["new_delta"][i] = new_row.delta
        changed = len(tables.entry)
        part["entry"][:changed], part["page"][:changed] = tables.entry, tables.page
        return packed

    def _pack_tokens(self, part: dict[str, Ints], rows: list[Row]) -> None:
        """The tokens of rows that may have several, and what those of the mixed family are scored against."""
        starts, at = [0], 0
        for row in rows:
            if row.reads_device:
                part["tokens"][at] = READ_DEVICE
            else:
                known = row.sequence.tokens
                part["tokens"][at : at + row.count] = known[row.start : row.start + row.count]
                if row.wants_tokens:
                    part["prompt_logprobs"][0] = 1
                if row.scores_prompt:
                    following = known[row.start + 1 : row.start + 1 + row.count]
                    part["targets"][at : at + len(following)] = following
                    part["prompt_logprobs"][0] = 1
            at += row.count
            part["tokens"][at : at + len(row.drafts)] = row.drafts
            at += len(row.drafts)
            starts.append(at)
        part["query_start"][: len(starts)] = starts
        part["query_start"][len(starts) :] = at

    def changes(self, packed: jax.Array) -> RowChanges:
        """The changes of the rows' state in a packed batch."""
        part = self._taken_apart(packed)
        return RowChanges(
            slot=part["new_slot"],
            length=part["new_length"],
            words=part["new_words"],
            entry=part["entry"],
            page=part["page"],
        )

    def batch(self, packed: jax.Array, rows: RowState) -> StepBatch:
        """The batch inside the jitted step.

        Args:
            packed: i32 [size].
            rows: the state of rows, to which the batch's changes have been applied.
        """
        part = self._taken_apart(packed)
        decode, slot, query_start = self.bucket.decode, part["slot"], part["query_start"]
        whose = slot if decode else slot[_row_of_token(query_start, part["tokens"], decode=False)]
        kv_len = jnp.where(slot < self.num_slots, rows.length[slot] + jnp.diff(query_start), 0)
        return StepBatch(
            tokens=jnp.where(part["tokens"] == READ_DEVICE, rows.last_token[whose], part["tokens"]),
            query_start=query_start,
            kv_len=kv_len,
            slot=slot,
            steps=part["steps"],
            prompt_len=rows.word("prompt_len", slot),
            second_start=rows.word("second_start", slot),
            page_tables=tuple(rows.page_tables[group, slot] for group in range(self.num_groups)),
            targets=part.get("targets"),
            any_prompt_logprobs=part["prompt_logprobs"][0] > 0,
            waits=part["waits"][0] > 0,
            media=MediaBatch.of(part),
            decode=decode,
            verify=bool(self.bucket.drafts),
        )

    def deltas(self, packed: jax.Array, before: jax.Array) -> jax.Array:
        """What the positions of slots are moved by, i32 [S], after a packed batch."""
        part = self._taken_apart(packed)
        return before.at[part["new_slot"]].set(part["new_delta"], mode="drop")

    def _taken_apart(self, packed: jax.Array) -> dict[str, jax.Array]:
        return {
            name: jax.lax.slice(packed, (place.start,), (place.stop,)).reshape(self.shapes[name])
            for name, place in self._places.items()
        }
