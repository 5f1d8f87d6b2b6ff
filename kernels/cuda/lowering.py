"""What kernels use of Pallas, and all that differs between JAX 0.10 to 0.12 and between Pallas' lowerings for GPUs.

Most kernels are lowered by Triton, which serves Ampere and Hopper alike and is deprecated from JAX 0.11 on; a lowering
that follows it is chosen here. What Mosaic GPU lowers is in `threads.py` and `mosaic_prefill.py`. Every array reaches a
kernel whole, as a reference: what a program reads is computed from page tables and formats, not from a regular grid of
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

PLATFORM = "cuda"  # as JAX names it while lowering
MOSAIC_ON_AMPERE = jax.__version_info__ >= (0, 12)  # before, its kernels began with an instruction of Hopper's
MIN_DOT = 16  # rows, columns and depth of the smallest product of tensor cores


@cache
def has_triton() -> bool:
    """Whether this JAX lowers kernels by Triton too. Looked up without an import, which takes a while."""
    return (Path(jax.__file__).parent / "experimental" / "pallas" / "triton.py").exists()


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled and started.

    Args:
        grid: programs along up to three dimensions.
        warps: warps of a program, 32 threads each; a power of two.
        stages: stages of the software pipelines of its loops.
        interpret: run it as XLA operations, on any device.
    """

    grid: tuple[int, ...]
    warps: int = 4
    stages: int = 2
    interpret: bool = False


def launch(
    kernel: Callable[..., None],
    out: Sequence[jax.ShapeDtypeStruct],
    arguments: Sequence[jax.Array],
    how: Launch,
    *,
    in_place: Mapping[int, int] = MappingProxyType({}),
) -> list[jax.Array]:
    """Runs a kernel on whole arrays.

    Nothing is traced but the shapes of the results until a program is lowered for a GPU: programs that offer the kernel
    beside implementations for other platforms do not pay for it there.

    Args:
        kernel: called with a reference for each argument and for each result.
        out: shapes and types of the results; elements that no program writes are undefined.
        in_place: arguments, by number, that are the memory of results, by number, which begin with their elements.
    """
    from jax.experimental import pallas as pl  # here: a start that finds all programs on disk does without it
    from jax.experimental.pallas import triton

    call = pl.pallas_call(
        kernel,
        grid=how.grid,
        out_shape=list(out),
        input_output_aliases=dict(in_place),
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        interpret=how.interpret,
    )
    if how.interpret:
        return list(call(*arguments))
    return deferred(call, out, arguments)


def deferred(
    call: Callable[..., Any], out: Sequence[jax.ShapeDtypeStruct], arguments: Sequence[jax.Array]
) -> list[jax.Array]:
    """What a function gives, a list, that is traced only when a program is lowered for a GPU.

    Args:
        out: shapes and types of what it gives.
    """
    return list(_deferred.bind(*arguments, call=call, out=tuple((o.shape, jnp.dtype(o.dtype)) for o in out)))


def _call(*arguments: jax.Array, call: Callable[..., Any], out: Any) -> Any:
    return call(*arguments)


def _shapes(*arguments: Any, call: Callable[..., Any], out: Any) -> Any:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in out]


_deferred = Primitive("llmjax_cuda_kernel")
_deferred.multiple_results = True
_deferred.def_impl(_call)
_deferred.def_abstract_eval(_shapes)
mlir.register_lowering(_deferred, mlir.lower_fun(_call, multiple_results=True), platform=PLATFORM)


def load(ref: Any, index: tuple[Any, ...], where: jax.Array | None = None) -> jax.Array:
    """Elements of an array in memory; zero where ``where`` is false.

    Args:
        index: a number or an i32 array for each dimension; the arrays broadcast to the shape of the result.
    """
    from jax.experimental.pallas import triton

    if where is None:
        return triton.load(ref.at[index])
    return triton.load(ref.at[index], mask=where, other=jnp.zeros((), ref.dtype))


def store(ref: Any, index: tuple[Any, ...], values: jax.Array, where: jax.Array | None = None) -> None:
    """Writes elements of an array in memory, those where ``where`` is true."""
    from jax.experimental.pallas import triton

    triton.store(ref.at[index], values, mask=where)


def program_id(axis: int) -> jax.Array:
    """This program's place in the grid, i32."""
    from jax.experimental import pallas as pl

    program: jax.Array = pl.program_id(axis)
    return program


def dot(a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
    """``a @ b`` on tensor cores: in f32, or i32 if the factors are int8; exact products where they are f32.

    Args:
        a: [M, D]
        b: [D, N], or [N, D] to be transposed.
    """
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transpose_b else 0,)), ((), ())),
        precision="highest" if exact else None,
        preferred_element_type=jnp.int32 if a.dtype == jnp.int8 else jnp.float32,
    )


def power_of_2(least: int) -> int:
    """The next power of two: arrays in kernels have no other sizes."""
    return 1 << max(0, least - 1).bit_length()
