"""Memory for weights: what lies where, and how long it lives."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.weights import memory
from llmjax.weights.memory import HUGE_PAGE, PIECE, XLA_ALIGNMENT, HugePages, aligned_empty

BYTE = np.dtype(np.uint8)


@pytest.mark.parametrize("size", [1, 63, 1000, HUGE_PAGE + 1])
def test_arrays_are_aligned(size: int) -> None:
    for array in (aligned_empty((size,), BYTE), HugePages().empty((size,), BYTE)):
        assert array.ctypes.data % XLA_ALIGNMENT == 0
        assert array.shape == (size,) and array.flags.writeable


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70)), max_size=20))
def test_no_array_shares_memory_with_another(shapes: list[tuple[int, int]]) -> None:
    pages = HugePages()
    arrays = [pages.empty(shape, np.dtype(np.uint32)) for shape in shapes]
    for number, array in enumerate(arrays):
        array[...] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()


def test_small_arrays_lie_together_in_a_huge_page() -> None:
    pages = HugePages()
    first, second = pages.empty((100,), BYTE), pages.empty((100,), BYTE)
    assert first.ctypes.data % HUGE_PAGE == 0
    assert second.ctypes.data - first.ctypes.data == 128


def test_a_large_array_has_a_piece_of_its_own_size() -> None:
    pages = HugePages()
    pages.empty((10,), BYTE)
    array = pages.empty((PIECE + 1,), BYTE)
    assert array.ctypes.data % HUGE_PAGE == 0
    array[-1] = 1


def test_a_piece_is_given_back_with_its_last_array(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = []
    real = memory._map

    def kept_in_sight(nbytes: int) -> np.ndarray:
        found = real(nbytes)
        base = found
        while isinstance(base.base, np.ndarray):
            base = base.base
        mapped.append(weakref.ref(base))
        return found

    monkeypatch.setattr(memory, "_map", kept_in_sight)
    pages = HugePages()
    arrays = [pages.empty((PIECE // 2,), BYTE) for _ in range(3)]
    assert len(mapped) == 2
    del arrays[0]
    gc.collect()
    assert mapped[0]() is not None
    del arrays[0]
    gc.collect()
    assert mapped[0]() is None and mapped[1]() is not None
