"""The KV cache by itself, with sequences that are not computed."""

from __future__ import annotations

import pytest

from llmjax.engine.core.kv_cache import KVCache
from llmjax.engine.core.layer_states import GroupSpec
from llmjax.engine.core.request import EngineRequest, Sequence, SequenceTimes
from llmjax.models.layers.state import AllTokens, LastTokens, Span
from llmjax.sampling.params import SamplingParams

pytestmark = pytest.mark.smoke


def cache_of(*spans: Span) -> KVCache:
    """A KV cache with pages of 2 tokens."""
    specs = tuple(GroupSpec(span=span, num_pages=9) for span in spans)
    return KVCache(specs, page_size=2, num_slots=2, pages_per_sequence=8)


def sequence_of(tokens: list[int], *, slot: int) -> Sequence:
    request = EngineRequest(
        request_id=slot,
        prompt_token_ids=tokens,
        params=SamplingParams(),
        max_tokens=4,
        stop_token_ids=frozenset(),
    )
    times = SequenceTimes(arrival=0.0)
    return Sequence(request=request, index=0, order=slot, seed=0, tokens=list(tokens), times=times, slot=slot)


def test_there_is_room_as_far_as_every_group_has_it() -> None:
    kv = cache_of(AllTokens(), LastTokens(2))
    sequence = sequence_of([1, 2, 3, 4], slot=0)
    assert kv.attach_prefix(sequence) == 0
    assert kv.reserve(sequence, 4)
    assert [group.room(sequence) for group in kv.groups] == [4, 3]  # at 3 the window can give its first page back
    assert sequence.room == 3


def test_a_page_can_be_found_as_soon_as_the_step_that_fills_it_is_planned() -> None:
    kv = cache_of(AllTokens())
    first = sequence_of([1, 2, 3, 4], slot=0)
    kv.attach_prefix(first)
    assert kv.reserve(first, 4)
    kv.advance(first, 4)
    assert first.num_committed == 2
    assert kv.attach_prefix(sequence_of([1, 2, 3, 4, 5], slot=1)) == 4
