"""Packing a plan into one array, and unpacking it on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.engine.core.layer_states import TABLE_CHUNK, TableChanges
from llmjax.engine.core.request import EngineRequest, Sequence, SequenceTimes
from llmjax.engine.core.scheduler import Row, StepPlan
from llmjax.engine.device.batch import BatchLayout, Bucket, make_buckets
from llmjax.engine.device.edits import EDITS
from llmjax.engine.device.rows import (
    ENDED,
    NO_STOP,
    NewRow,
    RowState,
    make_row_state,
    row_words,
)
from llmjax.engine.device.slots import table_edit
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.sampler import SamplingBatch
from llmjax.sampling.settings import RequestSampling, request_sampling

SLOTS, WIDTH, PAGE = 6, 5, 4


def sequence(
    slot: int, tokens: list[int], *, prompt: int | None = None, stops: Iterable[int] = (), **options: Any
) -> Sequence:
    request = EngineRequest(
        request_id=str(slot),
        prompt_token_ids=tokens[:prompt],
        params=SamplingParams(**options),
        max_tokens=9,
        stop_token_ids=frozenset(stops),
    )
    times = SequenceTimes(arrival=0.0)
    return Sequence(request=request, index=0, order=slot, seed=0, tokens=tokens, times=times, slot=slot)


def layout_of(bucket: Bucket, *, groups: int = 1) -> BatchLayout:
    return BatchLayout(bucket=bucket, num_slots=SLOTS, pages_per_sequence=WIDTH, num_groups=groups)


def changed(groups: int = 1, *, slots: Any = range(SLOTS)) -> TableChanges:
    """Changes of all page table entries of some slots."""
    entry = np.concatenate([table(slot, group)[0] for group in range(groups) for slot in slots])
    return TableChanges(entry.astype(np.int32), np.concatenate([pages(s, g) for g in range(groups) for s in slots]))


def table(slot: int, group: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Flat indices of a slot's page table entries, and its pages."""
    return np.arange(WIDTH) + (group * SLOTS + slot) * WIDTH, pages(slot, group)


def pages(slot: int, group: int = 0) -> np.ndarray:
    return np.arange(1, 1 + WIDTH, dtype=np.int32) + slot * WIDTH + 100 * group


def rows_of(*, groups: int = 1, lengths: dict[int, int] | None = None) -> RowState:
    """Rows whose sampling and stop ids are told apart by their slot."""
    rows = make_row_state(num_slots=SLOTS, num_groups=groups, pages_per_sequence=WIDTH)
    length, tables = np.zeros(SLOTS, np.int32), np.zeros(rows.page_tables.shape, np.int32)
    for slot, known in (lengths or {}).items():
        length[slot] = known
    for group in range(groups):
        for slot in range(SLOTS):
            tables[group, slot] = pages(slot, group)
    words = np.stack(
        [row_words(sequence(slot, [1, 2, 3], stops=range(slot)), settings_of(slot)) for slot in range(SLOTS)]
    )
    return replace(
        rows,
        length=jnp.asarray(length),
        words=jnp.asarray(words),
        page_tables=jnp.asarray(tables),
        last_token=jnp.arange(SLOTS, dtype=jnp.int32) + 50,
    )


def settings_of(slot: int) -> RequestSampling:
    return request_sampling(SamplingParams(temperature=slot / 4, top_k=slot), vocab_size=96, seed=2**40 + slot)


def words_of(slot: int, tokens: list[int], **options: Any) -> np.ndarray:
    return row_words(sequence(slot, tokens, **options), settings_of(slot))


def packed_for(layout: BatchLayout, rows: list[Row], **changes: Any) -> jax.Array:
    return jnp.asarray(layout.pack(StepPlan(rows=rows), **{"new": [], "tables": TableChanges.none(), **changes}))


@pytest.mark.parametrize(
    ("seqs", "batched", "decode", "mixed"),
    [
        (1, 1, [1], [1]),
        (6, 40, [1, 2, 4, 6], [16, 32, 40]),
        (8, 64, [1, 2, 4, 8], [16, 32, 64]),
        (4, 8, [1, 2, 4], [8]),
    ],
)
def test_buckets(seqs: int, batched: int, decode: list[int], mixed: list[int]) -> None:
    buckets = make_buckets(max_num_seqs=seqs, max_num_batched_tokens=batched, decode_steps=3)
    assert [b for b in buckets if b.decode] == [Bucket(tokens=n, rows=n, decode=True, steps=3) for n in decode]
    assert [b for b in buckets if not b.decode] == [Bucket(tokens=n, rows=seqs, decode=False) for n in mixed]


@pytest.mark.parametrize(
    ("batched", "sizes"), [(4, [4]), (16, [8, 16]), (40, [8, 16, 24, 32, 40]), (128, [8, 16, 24, 32, 48, 64, 128])]
)
def test_buckets_of_models_that_make_vectors(batched: int, sizes: list[int]) -> None:
    buckets = make_buckets(max_num_seqs=3, max_num_batched_tokens=batched, generates=False)
    assert buckets == [Bucket(tokens=n, rows=3, decode=False) for n in sizes]


def test_which_plans_a_bucket_holds() -> None:
    decode, mixed = Bucket(tokens=2, rows=2, decode=True), Bucket(tokens=16, rows=4, decode=False)

    def plan(*counts: int, **options: Any) -> StepPlan:
        rows = [
            Row(sequence=sequence(i, [1] * 20, **options), start=0, count=n, samples=False)
            for i, n in enumerate(counts)
        ]
        return StepPlan(rows=rows)

    assert decode.holds(plan(1, 1))
    assert not decode.holds(plan(1, 1, 1))
    assert not decode.holds(plan(2))
    assert not decode.holds(plan(1, prompt_logprobs=0))  # only the mixed family scores prompts
    assert mixed.holds(plan(1, prompt_logprobs=0))
    assert mixed.holds(plan(1, 1, 1, 13))
    assert not mixed.holds(plan(1, 1, 1, 14))
    assert not mixed.holds(plan(1, 1, 1, 1, 1))
    three = StepPlan(rows=[Row(sequence(0, [1, 2]), start=1, count=1, samples=True, steps=3)])
    assert Bucket(tokens=2, rows=2, decode=True, steps=3).holds(three)
    assert not decode.holds(three)
    assert not mixed.holds(three)


def test_mixed_batch() -> None:
    decoding = sequence(4, [7, 8, 9], prompt=2)  # one more token is on the device
    chunk = sequence(1, list(range(20, 32)), prompt_logprobs=0)
    rows = [Row(decoding, start=3, count=1, samples=True), Row(chunk, start=5, count=6, samples=False)]
    layout = layout_of(Bucket(tokens=16, rows=4, decode=False), groups=2)
    packed = packed_for(layout, rows)
    assert packed.shape == (layout.size,)
    state = rows_of(groups=2, lengths={4: 3, 1: 5})
    batch = layout.batch(packed, state)
    assert batch.tokens[:7].tolist() == [54, 25, 26, 27, 28, 29, 30]
    assert batch.targets is not None
    assert batch.targets[:7].tolist() == [0, 26, 27, 28, 29, 30, 31]
    assert bool(batch.any_prompt_logprobs)
    assert batch.query_start.tolist() == [0, 1, 7, 7, 7]
    assert batch.kv_len.tolist() == [4, 11, 0, 0]
    assert batch.slot.tolist() == [4, 1, SLOTS, SLOTS]
    assert batch.steps.tolist() == [1, 0, 0, 0]
    stops, min_len = state.word("stops", batch.slot), state.word("min_len", batch.slot)
    assert stops[:2].tolist() == [[0, 1, 2, 3, *[NO_STOP] * 4], [0, *[NO_STOP] * 7]]
    assert batch.prompt_len[:2].tolist() == min_len[:2].tolist() == [3, 3]
    assert batch.last_tokens[:2].tolist() == [54, 30]
    words = state.word("sampling", batch.slot)
    sampling = SamplingBatch.from_words(words, slot=batch.slot, samples=batch.steps > 0, position=batch.kv_len)
    assert sampling.temperature[:2].tolist() == [1.0, 0.25]
    assert sampling.key[:2].tolist() == [[2**8, 4], [2**8, 1]]
    for group, found in enumerate(batch.page_tables):
        np.testing.assert_array_equal(found[:2], [pages(4, group), pages(1, group)])
    row, position, (first, second) = batch.ragged(page_size=PAGE)
    assert row[:7].tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert position[:7].tolist() == [3, 5, 6, 7, 8, 9, 10]
    # Slot 4's table begins 21, 22 …, slot 1's 6, 7, 8 …; padding writes to the dummy page.
    places = [(21, 3), (7, 1), (7, 2), (7, 3), (8, 0), (8, 1), (8, 2)]
    assert first.kv_index.tolist() == [page * PAGE + offset for page, offset in places] + [0] * 9
    assert second.kv_index[:7].tolist() == [(page + 100) * PAGE + offset for page, offset in places]
    assert not first.decode


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, PAGE * WIDTH), min_size=1, max_size=4),
    slots=st.permutations(range(SLOTS)),
)
def test_decode_batch(lengths: list[int], slots: list[int]) -> None:
    rows = [
        Row(sequence(slot, [3] * (length - 1), prompt=1), start=length - 1, count=1, samples=True, steps=slot + 1)
        for slot, length in zip(slots, lengths, strict=False)
    ]
    layout = layout_of(Bucket(tokens=4, rows=4, decode=True))
    count = len(rows)
    before = {slot: length - 1 for slot, length in zip(slots, lengths, strict=False)}
    batch = layout.batch(packed_for(layout, rows), rows_of(lengths=before))
    assert batch.targets is None
    assert batch.tokens.tolist() == [50 + slot for slot in slots[:count]] + [0] * (4 - count)
    assert batch.kv_len.tolist() == lengths + [0] * (4 - count)
    assert batch.steps.tolist() == [slot + 1 for slot in slots[:count]] + [0] * (4 - count)
    row, position, (ragged,) = batch.ragged(page_size=PAGE)
    assert row.tolist() == [0, 1, 2, 3]
    assert position.tolist() == [length - 1 for length in lengths] + [0] * (4 - count)
    expected = [
        pages(slot)[(length - 1) // PAGE] * PAGE + (length - 1) % PAGE
        for slot, length in zip(slots, lengths, strict=False)
    ]
    assert ragged.kv_index.tolist() == expected + [0] * (4 - count)
    assert ragged.decode


def test_a_dispatch_goes_on_from_what_its_steps_leave() -> None:
    """A step starts from the device's own lengths, whatever the host expects: a row may have fewer tokens."""
    layout = layout_of(Bucket(tokens=4, rows=4, decode=True, steps=3))
    rows = [Row(sequence(slot, [3], prompt=1), start=9, count=1, samples=True, steps=3 - slot) for slot in range(3)]
    state = rows_of(lengths={0: 4, 1: 9, 2: 9})
    batch = layout.batch(packed_for(layout, rows), state)
    assert batch.after(jnp.int32(0), state).kv_len.tolist() == [5, 10, 10, 0]
    later = replace(state, length=state.length + 1, last_token=state.last_token.at[0].set(ENDED))
    now = batch.after(jnp.int32(1), later)
    assert now.kv_len.tolist() == [0, 11, 0, 0]  # the first has ended, the last has its only token
    assert now.steps.tolist() == [0, 1, 0, 0]
    assert now.tokens[1] == 51


@settings(max_examples=30)
@given(data=st.data())
def test_rows_have_what_the_host_has_told_of_them(data: st.DataObject) -> None:
    """New rows and table entries, in any number; more entries than a batch has room for go before it in chunks."""
    groups = data.draw(st.integers(1, 2))
    layout = layout_of(Bucket(tokens=4, rows=4, decode=True), groups=groups)
    state = make_row_state(num_slots=SLOTS, num_groups=groups, pages_per_sequence=WIDTH)
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), max_size=4, unique=True))
    new = [
        NewRow(slot, slot + 5, row_words(sequence(slot, [1, 2], min_tokens=slot), settings_of(slot))) for slot in slots
    ]
    told = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True))
    tables = changed(groups, slots=told)
    *before, last = tables.chunks(layout.room)
    assert [len(chunk.entry) for chunk in before] == [TABLE_CHUNK] * len(before) or len(before) == 1
    assert len(last.entry) <= layout.room
    page_tables = state.page_tables
    for chunk in before:
        edit = table_edit(chunk, size=page_tables.size)
        page_tables = EDITS[edit.name].function(page_tables, *edit.arguments)
    packed = packed_for(layout, [], new=new, tables=last)
    once = layout.changes(packed).made(replace(state, page_tables=page_tables))
    twice = layout.changes(packed).made(once)
    for rows in (once, twice):
        expected = np.zeros(state.page_tables.shape, np.int32)
        for slot in told:
            expected[:, slot] = [pages(slot, group) for group in range(groups)]
        np.testing.assert_array_equal(rows.page_tables, expected)
        assert rows.length.tolist() == [slot + 5 if slot in slots else 0 for slot in range(SLOTS)]
        min_len = rows.word("min_len", jnp.arange(SLOTS))
        assert min_len.tolist() == [slot + 2 if slot in slots else 0 for slot in range(SLOTS)]


def test_many_table_entries_go_in_chunks() -> None:
    tables = TableChanges(np.arange(3000, dtype=np.int32), np.arange(3000, dtype=np.int32))
    parts = list(tables.chunks(10))
    assert [len(part.entry) for part in parts] == [TABLE_CHUNK, TABLE_CHUNK, 3000 - 2 * TABLE_CHUNK, 0]
    np.testing.assert_array_equal(np.concatenate([part.page for part in parts]), tables.page)
    assert [len(part.entry) for part in tables.chunks(3000)] == [3000]


def test_every_pack_is_a_new_array() -> None:
    plan = StepPlan(rows=[Row(sequence(0, [3, 4]), start=0, count=2, samples=True)])
    layout = layout_of(Bucket(tokens=16, rows=4, decode=False))
    first = layout.pack(plan, new=[], tables=TableChanges.none())
    second = layout.pack(plan, new=[], tables=TableChanges.none())
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, second)
