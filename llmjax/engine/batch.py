"""A step's metadata as one int32 array: packed on the host, one transfer, taken apart inside the jitted step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.scheduler import StepPlan
from llmjax.kernels.attention import RaggedBatch
from llmjax.sampling.sampler import SamplingBatch
from llmjax.sampling.settings import SETTINGS_WORDS

READ_DEVICE = -1  # in ``tokens``: the input is the slot's last sampled token
MAX_STOPS = 8  # stop ids a row brings to the device; the host alone finds further ones, a dispatch later
NO_STOP = -1  # in ``stops``: no id


@dataclass(frozen=True)
class Bucket:
    """A static shape of the step: padded tokens and rows. In the decode family every row is one token."""

    tokens: int
    rows: int
    decode: bool
    steps: int = 1  # that one dispatch may take; more only in the decode family

    def holds(self, plan: StepPlan) -> bool:
        if plan.steps > self.steps or (self.decode and not plan.decode_only):
            return False
        return plan.num_tokens <= self.tokens and len(plan.rows) <= self.rows


def make_buckets(*, max_num_seqs: int, max_num_batched_tokens: int, decode_steps: int = 1) -> list[Bucket]:
    """Both families: decode buckets of 1, 2, 4, … rows; mixed ones of 16, 32, … tokens with all rows."""
    decode = [Bucket(tokens=n, rows=n, decode=True, steps=decode_steps) for n in _doubling(1, max_num_seqs)]
    mixed = [Bucket(tokens=n, rows=max_num_seqs, decode=False) for n in _doubling(16, max_num_batched_tokens)]
    return decode + mixed


def _doubling(first: int, last: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """What the step sees of the batch, on the device. Letters as in ``llmjax.kernels.attention``; G page groups."""

    tokens: jax.Array  # i32 [T], READ_DEVICE where the slot's last token is meant
    query_start: jax.Array  # i32 [R + 1]
    kv_len: jax.Array  # i32 [R]
    prompt_len: jax.Array  # i32 [R], which some rope scalings look at
    slot: jax.Array  # i32 [R]; padding rows have num_slots: read clamped, writes dropped
    steps: jax.Array  # i32 [R], tokens to sample one after another; 0 in the middle of a prompt
    stops: jax.Array  # i32 [R, MAX_STOPS], ids after which the row ends; NO_STOP where there are fewer
    page_tables: tuple[jax.Array, ...]  # G × i32 [R, P]
    targets: jax.Array | None  # i32 [T], the prompt token after each token; None in the decode family
    any_prompt_logprobs: jax.Array  # bool []
    sampling: SamplingBatch


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a bucket's batch lies in the packed array.

    Args:
        num_slots: sequences that may run at once.
        pages_per_sequence: width P of a page table.
        num_groups: KV groups.
    """

    bucket: Bucket
    num_slots: int
    pages_per_sequence: int
    num_groups: int

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        tokens, rows = self.bucket.tokens, self.bucket.rows
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (tokens,),
            "query_start": (rows + 1,),
            "kv_len": (rows,),
            "prompt_len": (rows,),
            "slot": (rows,),
            "steps": (rows,),
            "stops": (rows, MAX_STOPS),
            "sampling": (rows, SETTINGS_WORDS),
            "prompt_logprobs": (1,),
        }
        if not self.bucket.decode:
            shapes["targets"] = (tokens,)
        for group in range(self.num_groups):
            shapes[f"page_table{group}"] = (rows, self.pages_per_sequence)
        return shapes

    @cached_property
    def _offsets(self) -> dict[str, int]:
        offsets, end = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = end
            end += int(np.prod(shape))
        return offsets

    @cached_property
    def size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def pack(self, plan: StepPlan, *, tables: Seq[np.ndarray], sampling: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The packed batch of a plan.

        Args:
            tables: per group i32 [num_slots, P], the page tables by slot.
            sampling: i32 [num_slots, SETTINGS_WORDS], the sampling settings by slot.
            stops: i32 [num_slots, MAX_STOPS], the stop ids by slot.

        Returns:
            i32 [size]; a new array every time, because the device may read it in place.
        """
        packed = np.zeros(self.size, np.int32)
        field = {
            name: packed[self._offsets[name] : self._offsets[name] + int(np.prod(shape))].reshape(shape)
            for name, shape in self.shapes.items()
        }
        count = len(plan.rows)
        tokens, starts, lengths, slots = field["tokens"], [0], [], []
        prompt_logprobs = False
        for row in plan.rows:
            at, sequence = starts[-1], row.sequence
            if row.reads_device:
                tokens[at] = READ_DEVICE
            else:
                tokens[at : at + row.count] = sequence.tokens[row.start : row.start + row.count]
                if row.scores_prompt:
                    following = sequence.tokens[row.start + 1 : row.start + 1 + row.count]
                    field["targets"][at : at + len(following)] = following
                    prompt_logprobs = True
            starts.append(at + row.count)
            lengths.append(row.start + row.count)
            slots.append(sequence.slot)
        field["query_start"][: count + 1] = starts
        field["query_start"][count + 1 :] = starts[-1]
        field["kv_len"][:count] = lengths
        field["prompt_len"][:count] = [row.sequence.num_prompt_tokens for row in plan.rows]
        field["slot"][:count] = slots
        field["slot"][count:] = self.num_slots
        field["steps"][:count] = [row.steps if row.samples else 0 for row in plan.rows]
        field["stops"][:count] = stops[slots]
        for group, table in enumerate(tables):
            field[f"page_table{group}"][:count] = table[slots]
        field["prompt_logprobs"][0] = prompt_logprobs
        field["sampling"][:count] = sampling[slots]
        return packed

    def unpack(self, packed: jax.Array) -> StepBatch:
        """The batch inside the jitted step; inverse of ``pack``."""
        field = {
            name: jax.lax.slice(packed, (at,), (at + int(np.prod(shape)),)).reshape(shape)
            for (name, shape), at in zip(self.shapes.items(), self._offsets.values(), strict=True)
        }
        return StepBatch(
            tokens=field["tokens"],
            query_start=field["query_start"],
            kv_len=field["kv_len"],
            prompt_len=field["prompt_len"],
            slot=field["slot"],
            steps=field["steps"],
            stops=field["stops"],
            page_tables=tuple(field[f"page_table{group}"] for group in range(self.num_groups)),
            targets=field.get("targets"),
            any_prompt_logprobs=field["prompt_logprobs"][0] > 0,
            sampling=SamplingBatch.from_words(
                field["sampling"], slot=field["slot"], samples=field["steps"] > 0, position=field["kv_len"]
            ),
        )

    def ragged(self, batch: StepBatch, *, page_size: int) -> tuple[jax.Array, jax.Array, tuple[RaggedBatch, ...]]:
        """Row and position of every token (i32 [T] each), and the batch as each group's attention sees it.

        Padding tokens get row R - 1 and a position past its end; they write to the dummy page.
        """
        tokens, rows = self.bucket.tokens, self.bucket.rows
        if self.bucket.decode:
            row = jnp.arange(tokens, dtype=jnp.int32)
            position = jnp.maximum(batch.kv_len - 1, 0)
            real = batch.kv_len > 0
        else:
            index = jnp.arange(tokens, dtype=jnp.int32)
            # Comparing all is one kernel; a binary search is a loop, which on an accelerator the host may have to lead.
            row = jnp.searchsorted(batch.query_start, index, side="right", method="compare_all").astype(jnp.int32) - 1
            real = index < batch.query_start[rows]
            row = jnp.minimum(row, rows - 1)
            position = jnp.where(real, index - batch.query_start[row + 1] + batch.kv_len[row], 0)
        page, offset = position // page_size, position % page_size

        def group(table: jax.Array) -> RaggedBatch:
            kv_index = jnp.where(real, table[row, page] * page_size + offset, 0)
            return RaggedBatch(
                query_start=batch.query_start,
                kv_len=batch.kv_len,
                page_table=table,
                kv_index=kv_index,
                decode=self.bucket.decode,
            )

        return row, position, tuple(group(table) for table in batch.page_tables)
