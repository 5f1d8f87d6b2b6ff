"""A step's metadata as one int32 array: packed on the host, one transfer, taken apart inside the jitted step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.device_state import ENDED
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
    decode: bool = field(metadata={"static": True})  # T == R and token r is row r's only one

    @property
    def last(self) -> jax.Array:
        """i32 [R]: place of each row's last token."""
        return jnp.maximum(self.query_start[1:] - 1, 0)

    @property
    def row(self) -> jax.Array:
        """i32 [T]: whose each token is. Padding has row R - 1."""
        index = jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
        if self.decode:
            return index
        # Comparing all is one kernel; a binary search is a loop, which on an accelerator the host may have to lead.
        row = jnp.searchsorted(self.query_start, index, side="right", method="compare_all").astype(jnp.int32) - 1
        return jnp.minimum(row, self.slot.shape[0] - 1)

    def inputs(self, last_token: jax.Array) -> jax.Array:
        """i32 [T]: the tokens that the model takes in, ENDED where there is none.

        Args:
            last_token: i32 [S], of the device's state.
        """
        slot = self.slot if self.decode else self.slot[self.row]
        return jnp.where(self.tokens == READ_DEVICE, last_token[slot], self.tokens)

    def last_inputs(self, last_token: jax.Array) -> jax.Array:
        """i32 [R]: of ``inputs``, the rows' last ones."""
        inputs = self.inputs(last_token)
        return inputs if self.decode else inputs[self.last]

    def after(self, done: jax.Array, last_token: jax.Array) -> StepBatch:
        """The rest of a dispatch of the decode family: rows that have ended or have their tokens are padding.

        Args:
            done: i32 [], steps taken.
            last_token: i32 [S], of the device's state.
        """
        now = replace(self, tokens=jnp.where(done == 0, self.tokens, READ_DEVICE))
        alive = (self.kv_len > 0) & (now.inputs(last_token) != ENDED) & (done < jnp.maximum(self.steps, 1))
        return replace(
            now,
            kv_len=jnp.where(alive, self.kv_len + done, 0),
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
            )

        return row, position, tuple(group(table) for table in self.page_tables)


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
        part = {
            name: packed[self._offsets[name] : self._offsets[name] + int(np.prod(shape))].reshape(shape)
            for name, shape in self.shapes.items()
        }
        count = len(plan.rows)
        tokens, starts, lengths, slots = part["tokens"], [0], [], []
        prompt_logprobs = False
        for row in plan.rows:
            at, sequence = starts[-1], row.sequence
            if row.reads_device:
                tokens[at] = READ_DEVICE
            else:
                tokens[at : at + row.count] = sequence.tokens[row.start : row.start + row.count]
                if row.scores_prompt:
                    following = sequence.tokens[row.start + 1 : row.start + 1 + row.count]
                    part["targets"][at : at + len(following)] = following
                    prompt_logprobs = True
            starts.append(at + row.count)
            lengths.append(row.start + row.count)
            slots.append(sequence.slot)
        part["query_start"][: count + 1] = starts
        part["query_start"][count + 1 :] = starts[-1]
        part["kv_len"][:count] = lengths
        part["prompt_len"][:count] = [row.sequence.num_prompt_tokens for row in plan.rows]
        part["slot"][:count] = slots
        part["slot"][count:] = self.num_slots
        part["steps"][:count] = [row.steps if row.samples else 0 for row in plan.rows]
        part["stops"][:count] = stops[slots]
        for group, table in enumerate(tables):
            part[f"page_table{group}"][:count] = table[slots]
        part["prompt_logprobs"][0] = prompt_logprobs
        part["sampling"][:count] = sampling[slots]
        return packed

    def unpack(self, packed: jax.Array) -> StepBatch:
        """The batch inside the jitted step; inverse of ``pack``."""
        part = {
            name: jax.lax.slice(packed, (at,), (at + int(np.prod(shape)),)).reshape(shape)
            for (name, shape), at in zip(self.shapes.items(), self._offsets.values(), strict=True)
        }
        return StepBatch(
            tokens=part["tokens"],
            query_start=part["query_start"],
            kv_len=part["kv_len"],
            prompt_len=part["prompt_len"],
            slot=part["slot"],
            steps=part["steps"],
            stops=part["stops"],
            page_tables=tuple(part[f"page_table{group}"] for group in range(self.num_groups)),
            targets=part.get("targets"),
            any_prompt_logprobs=part["prompt_logprobs"][0] > 0,
            sampling=SamplingBatch.from_words(
                part["sampling"], slot=part["slot"], samples=part["steps"] > 0, position=part["kv_len"]
            ),
            decode=self.bucket.decode,
        )
