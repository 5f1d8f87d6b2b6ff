"""Zeros that take no memory before they are written."""

import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.cpu.library import library
from llmjax.kernels.zeros import zeros

pytestmark = pytest.mark.jax_api

needs_library = pytest.mark.skipif(library() is None, reason="the C++ kernels are not built")
LARGE = (3, 1 << 20)
PAGES = Path("/proc/self/pagemap")


@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 1000, 100), (1 << 21) // 4 + 3])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.bool_, np.uint8])
def test_all_are_zero(shape: tuple[int, ...] | int, dtype: type) -> None:
    found = np.asarray(jax.jit(lambda: zeros(np.atleast_1d(shape), dtype))())
    assert found.dtype == dtype
    assert found.shape == tuple(np.atleast_1d(shape))
    assert not found.any()


def test_memory_that_was_used_before_is_zero_again() -> None:
    """Blocks come back from the allocator with what was in them."""
    make = jax.jit(lambda: zeros(LARGE, jnp.float32))
    for _ in range(4):
        array = make()
        assert not np.asarray(array).any()
        array = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        assert np.asarray(array).all()
        del array


def test_two_of_one_shape_are_two() -> None:
    """Equal calls are not taken for one, whose result would be shared or copied."""
    first, second = jax.jit(lambda: (zeros(LARGE, jnp.float32), zeros(LARGE, jnp.float32)))()
    first = jax.jit(lambda x: x.at[0, 0].set(1.0), donate_argnums=0)(first)
    assert float(first[0, 0]) == 1.0
    assert not np.asarray(second).any()


@needs_library
@pytest.mark.skipif(not PAGES.exists(), reason="Linux says which pages are there")
def test_nothing_is_taken_before_it_is_written() -> None:
    size = 1 << 29
    array = jax.block_until_ready(jax.jit(lambda: zeros((2, size // 2), jnp.uint8))())
    assert array.nbytes == size
    assert present(array) < size // 100  # its ends, with what the allocator writes before it
    part = jax.jit(lambda x: x.at[0].set(1), donate_argnums=0)(array)
    assert size // 2 <= present(part) < size // 2 + size // 100


def present(array: jax.Array) -> int:
    """How many bytes of an array are in memory, or were and are swapped out."""
    page = resource.getpagesize()
    with PAGES.open("rb") as pages:
        pages.seek(array.unsafe_buffer_pointer() // page * 8)
        entries = np.frombuffer(pages.read(array.nbytes // page * 8), np.uint64)
    return int(np.count_nonzero(entries >> 62)) * page
