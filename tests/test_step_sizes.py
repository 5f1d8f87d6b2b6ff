"""How much a step holds where no setting says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.config import EngineConfig
from llmjax.platforms import select_platform
from llmjax.settings import settings_of
from llmjax.step_sizes import BY_MEMORY, GIB, LEAST, MOST, StepSizes, step_sizes

CHUNK = 2048  # tokens of a prompt that keep a GPU's tensor cores busy


@pytest.mark.parametrize(
    ("card", "sizes"),
    [
        (80 * GIB, StepSizes(256, 8192)),
        (141 * GIB, StepSizes(256, 8192)),
        (48 * GIB, StepSizes(256, 2048)),
        (24 * GIB, StepSizes(256, 2048)),
        (8 * GIB, StepSizes(64, 2048)),
    ],
)
def test_sizes_follow_the_memory_of_the_smallest_card(card: int, sizes: StepSizes) -> None:
    """JAX's pool is what `gpu_memory_utilization` leaves of a card, 0.9 unless it is said."""
    smallest, larger = (
        SimpleNamespace(memory_stats=lambda n=n: {"bytes_limit": int(0.9 * n)}) for n in (card, 2 * card)
    )
    platform = replace(select_platform(EngineConfig()), device=smallest, name="cuda")
    assert platform.step_sizes == sizes
    process = SimpleNamespace(process_index=0)
    both = [SimpleNamespace(**vars(process), **vars(each)) for each in (larger, smallest)]
    assert replace(platform, device=both[0], mesh=tuple(both)).step_sizes == sizes


def test_a_card_without_a_pool_counts_as_a_small_one_and_other_devices_have_the_least() -> None:
    here = select_platform(EngineConfig())
    silent = SimpleNamespace(memory_stats=lambda: None)
    assert replace(here, device=silent, name="cuda").step_sizes == BY_MEMORY[-1][1]
    assert replace(here, device=silent, name="gcu").step_sizes == here.step_sizes == LEAST


def test_every_card_takes_chunks_that_keep_it_busy() -> None:
    assert all(sizes.max_num_batched_tokens >= CHUNK for _, sizes in BY_MEMORY)
    assert [least for least, _ in BY_MEMORY] == sorted((least for least, _ in BY_MEMORY), reverse=True)
    assert step_sizes(0) == BY_MEMORY[-1][1] and step_sizes(1 << 50) == MOST


def test_the_help_says_what_is_taken() -> None:
    said = {name: settings_of(EngineConfig)[name].help for name in ("max_num_seqs", "max_num_batched_tokens")}
    for name, text in said.items():
        for sizes in (LEAST, *(sizes for _, sizes in BY_MEMORY)):
            assert f" {getattr(sizes, name)}" in text
    assert f"{BY_MEMORY[0][0] // GIB} GiB" in said["max_num_batched_tokens"]
    assert f"{BY_MEMORY[1][0] // GIB} GiB" in said["max_num_seqs"]


@given(st.integers(0, 999), st.integers(0, 999), st.integers(0, 9999), st.integers(0, 9999))
def test_what_is_set_holds_and_room_is_made_where_it_is_missing(seqs: int, more: int, tokens: int, needed: int) -> None:
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    for sizes in (LEAST, MOST):
        filled = config.with_sizes(sizes)
        assert filled.max_num_seqs == (seqs or sizes.max_num_seqs)
        assert filled.max_num_batched_tokens == (tokens or sizes.max_num_batched_tokens)
        roomy = config.with_room(seqs=more, tokens=needed).with_sizes(sizes)
        assert roomy.max_num_seqs >= max(more, seqs) and roomy.max_num_batched_tokens >= max(needed, tokens)
        if more <= LEAST.max_num_seqs and needed <= LEAST.max_num_batched_tokens and not seqs and not tokens:
            assert roomy == filled
