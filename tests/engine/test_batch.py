"""Packing a plan into one array and taking it apart again on the device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.engine.batch import MAX_STOPS, READ_DEVICE, BatchLayout, Bucket, make_buckets
from llmjax.engine.request import EngineRequest, Sequence, SequenceTimes
from llmjax.engine.scheduler import Row, StepPlan
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.settings import SETTINGS_WORDS, request_sampling

SLOTS, WIDTH, PAGE = 6, 5, 4


def sequence(slot: int, tokens: list[int], *, prompt: int | None = None, **options: Any) -> Sequence:
    request = EngineRequest(
        request_id=str(slot),
        prompt_token_ids=tokens[:prompt],
        params=SamplingParams(**options),
        max_tokens=9,
        stop_token_ids=frozenset(),
    )
    times = SequenceTimes(arrival=0.0)
    return Sequence(request=request, index=0, order=slot, seed=0, tokens=tokens, times=times, slot=slot)


def layout_of(bucket: Bucket, *, groups: int = 1) -> BatchLayout:
    return BatchLayout(bucket=bucket, num_slots=SLOTS, pages_per_sequence=WIDTH, num_groups=groups)


def tables(groups: int = 1) -> list[np.ndarray]:
    return [np.arange(1, 1 + SLOTS * WIDTH, dtype=np.int32).reshape(SLOTS, WIDTH) + 100 * g for g in range(groups)]


SETTINGS = np.concatenate(
    [
        request_sampling(SamplingParams(temperature=i / 4, top_k=i), vocab_size=96, seed=2**40 + i).words.reshape(1, -1)
        for i in range(SLOTS)
    ]
)
STOPS = np.arange(SLOTS * MAX_STOPS, dtype=np.int32).reshape(SLOTS, MAX_STOPS)


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
    packed = layout.pack(StepPlan(rows=rows), tables=tables(2), sampling=SETTINGS, stops=STOPS)
    assert packed.shape == (layout.size,)
    batch = layout.unpack(jax.numpy.asarray(packed))
    assert batch.tokens[:7].tolist() == [READ_DEVICE, 25, 26, 27, 28, 29, 30]
    assert batch.targets is not None
    assert batch.targets[:7].tolist() == [0, 26, 27, 28, 29, 30, 31]
    assert bool(batch.any_prompt_logprobs)
    assert batch.query_start.tolist() == [0, 1, 7, 7, 7]
    assert batch.kv_len.tolist() == [4, 11, 0, 0]
    assert batch.slot.tolist() == [4, 1, SLOTS, SLOTS]
    assert batch.sampling.samples.tolist() == [True, False, False, False]
    assert batch.steps.tolist() == [1, 0, 0, 0]
    assert batch.stops[:2].tolist() == STOPS[[4, 1]].tolist()
    assert batch.sampling.position.tolist() == [4, 11, 0, 0]
    assert batch.sampling.temperature.tolist() == [1.0, 0.25, 0, 0]
    assert batch.sampling.key[:2].tolist() == [[2**8, 4], [2**8, 1]]
    for group, table in enumerate(batch.page_tables):
        np.testing.assert_array_equal(table, [*tables(2)[group][[4, 1]], [0] * WIDTH, [0] * WIDTH])
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
    batch = layout.unpack(layout.pack(StepPlan(rows=rows), tables=tables(), sampling=SETTINGS, stops=STOPS))
    assert batch.targets is None
    assert batch.tokens.tolist() == [READ_DEVICE] * count + [0] * (4 - count)
    assert batch.kv_len.tolist() == lengths + [0] * (4 - count)
    assert batch.steps.tolist() == [slot + 1 for slot in slots[:count]] + [0] * (4 - count)
    row, position, (ragged,) = batch.ragged(page_size=PAGE)
    assert row.tolist() == [0, 1, 2, 3]
    assert position.tolist() == [length - 1 for length in lengths] + [0] * (4 - count)
    expected = [
        tables()[0][slot, (length - 1) // PAGE] * PAGE + (length - 1) % PAGE
        for slot, length in zip(slots, lengths, strict=False)
    ]
    assert ragged.kv_index.tolist() == expected + [0] * (4 - count)
    assert ragged.decode


def test_every_pack_is_a_new_array() -> None:
    plan = StepPlan(rows=[Row(sequence(0, [3, 4]), start=0, count=2, samples=True)])
    layout = layout_of(Bucket(tokens=16, rows=4, decode=False))
    first = layout.pack(plan, tables=tables(), sampling=SETTINGS, stops=STOPS)
    second = layout.pack(plan, tables=tables(), sampling=SETTINGS, stops=STOPS)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, second)
    assert SETTINGS.shape == (SLOTS, SETTINGS_WORDS)
