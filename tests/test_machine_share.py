"""A machine divided: everything once, and nobody without."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmjax.machine_share import WHOLE_MACHINE, MachineShare


@given(st.lists(st.integers(), min_size=1, max_size=40, unique=True), st.integers(1, 9))
def test_parts(items: list[int], count: int) -> None:
    parts = [MachineShare(rank=rank, count=count).part(items) for rank in range(count)]
    assert all(parts)
    if len(items) >= count:
        assert [item for part in parts for item in part] == items
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert {item for part in parts for item in part} == set(items)
        assert {len(part) for part in parts} == {1}


def test_the_whole() -> None:
    assert WHOLE_MACHINE.is_whole and WHOLE_MACHINE.part([3, 4]) == [3, 4]
    assert MachineShare(rank=1, count=3).part([]) == []
