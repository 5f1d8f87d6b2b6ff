"""Kernels that say what each thread keeps in its registers, lowered by Mosaic GPU; Ampere's instructions alone, so that
one kernel serves every card since.

A program is a warpgroup of 128 threads. Each of its values is an array [128, 4]: four numbers of every thread, a quad,
which memory takes and gives at once (16 bytes). Arithmetic on quads is JAX's; `Threads` has what JAX has no word for.
Interpreted, the same kernel runs as XLA operations, and a product of fragments is computed from where the PTX ISA says
that their numbers lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cuda.lowering import deferred

WARPS = 4
THREADS = 32 * WARPS
QUAD = (THREADS, 4)
AXES = ("x", "y", "z")  # of a grid


@dataclass(frozen=True)
class Threads:
    """The threads of a program.

    Args:
        interpret: they are simulated.
    """

    interpret: bool

    def index(self) -> jax.Array:
        """Of each thread, i32 quads of four equal numbers."""
        if self.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, QUAD, 0)

        def emit(ctx: Any) -> Any:
            from jax.experimental.mosaic import gpu as mosaic
            from jaxlib.mlir.dialects import arith

            thread = mosaic.utils.thread_idx()
            return _quad([arith.remui(thread, mosaic.c(THREADS, thread.type))] * 4, signed=True)

        return _inline(emit, (), jnp.int32)

    def constant(self, value: float) -> jax.Array:
        """A quad of f32 of one number."""
        quad = jnp.full(QUAD, value, jnp.float32)
        return quad if self.interpret else _laid_out(quad)

    def load(self, ref: Any, at: jax.Array, further: int = 0) -> jax.Array:
        """Quads from memory.

        Args:
            ref: of one dimension, of 32-bit numbers, or of bf16, of which two are a number u32; what the kernel does
                not write, or shared memory.
            at: i32 quads; where the first of the numbers lies, a multiple of 16 bytes.
            further: so many numbers of ref behind that, for all threads.
        """
        halves = ref.dtype == jnp.bfloat16
        if self.interpret:
            found = ref[at[:, :1] + jnp.arange(further, further + (8 if halves else 4), dtype=jnp.int32)]
            return jax.lax.bitcast_convert_type(found.reshape(*QUAD, 2), jnp.uint32) if halves else found

        def emit(ctx: Any, ref: Any, at: Any) -> Any:
            from jax.experimental.mosaic import gpu as mosaic
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import llvm

            element = ir.MemRefType(ref.type).element_type
            address = mosaic.utils.getelementptr(_address(ref, at), [further], element)
            changes = mosaic.utils.is_smem_ref(ref)
            kind = ir.IntegerType.get_signless(32) if halves else element
            found = llvm.load(ir.VectorType.get((4,), kind), address, alignment=16, invariant=not changes)
            return _fragment(found, signed=False if isinstance(kind, ir.IntegerType) else None)

        return _inline(emit, (ref, at), jnp.uint32 if halves else ref.dtype)

    def store(self, ref: Any, at: jax.Array, quads: jax.Array) -> None:
        """Quads to memory; the arguments as in `load`. Threads that name one place must have equal quads."""
        if self.interpret:
            ref[at[:, :1] + jnp.arange(4, dtype=jnp.int32)] = quads
            return

        def emit(ctx: Any, ref: Any, at: Any, quads: Any) -> None:
            from jaxlib.mlir.dialects import llvm

            llvm.store(quads.registers.item(), _address(ref, at), alignment=16)

        _inline(emit, (ref, at, quads), None)

    def wait(self) -> None:
        """For all threads of the program, and for what they have stored."""
        if self.interpret:
            return

        def emit(ctx: Any) -> None:
            from jax.experimental.mosaic import gpu as mosaic

            mosaic.utils.warpgroup_barrier()

        _inline(emit, (), None)

    def spread(self, quads: jax.Array, number: int) -> jax.Array:
        """One number of each quad, four times."""
        if self.interpret:
            return jnp.broadcast_to(quads[:, number : number + 1], QUAD)

        def emit(ctx: Any, quads: Any) -> Any:
            return _quad([_numbers(quads)[number]] * 4, signed=quads.is_signed)

        return _inline(emit, (quads,), quads.dtype)

    def add(self, a: jax.Array, b: jax.Array | float) -> jax.Array:
        """The sums of quads u32 of two bf16 each, or of all their numbers with one, rounded."""
        if self.interpret:
            other = jnp.float32(b) if isinstance(b, float) else _halves(b)
            return jax.lax.bitcast_convert_type((_halves(a) + other).astype(jnp.bfloat16), jnp.uint32)

        def emit(ctx: Any, a: Any, *quads: Any) -> Any:
            other = [_both(b)] * 4 if isinstance(b, float) else _numbers(quads[0])
            return _fma(_numbers(a), 1.0, other)

        return _inline(emit, (a,) if isinstance(b, float) else (a, b), jnp.uint32)

    def scale(self, a: jax.Array, exponent: int) -> jax.Array:
        """Quads u32 of two bf16 each, subnormal ones too, times a power of two."""
        if self.interpret:  # by parts: CPUs take subnormal numbers for zeros
            bits = jax.lax.bitcast_convert_type(a, jnp.uint16).astype(jnp.int32)
            size, power = bits & 0x7F, bits >> 7 & 0xFF
            size = jnp.where(power == 0, size, size | 0x80) * (1 - (bits >> 15) * 2)
            found = jnp.ldexp(size.astype(jnp.float32), jnp.maximum(power, 1) - 134 + exponent)
            return jax.lax.bitcast_convert_type(found.astype(jnp.bfloat16), jnp.uint32)

        def emit(ctx: Any, a: Any) -> Any:
            return _fma(_numbers(a), 2.0**exponent, [_both(-0.0)] * 4)

        return _inline(emit, (a,), jnp.uint32)

    def multiply(
        self, sums: Sequence[jax.Array], low: jax.Array, high: jax.Array, x: jax.Array, step: int
    ) -> tuple[jax.Array, jax.Array]:
        """Products of tensor cores: of each warp's ``32 rows x 16`` with its ``16 x 8 columns``, two mma of m16n8k16.

        Of lane ``4 * g + c``, row is the number in its quads, g among each 8; with depth k = 8 * high + 2 * c + half.

        Args:
            sums: f32, two quads: [i] of the first and of the second are row ``4 * g + i``, columns ``2 * c`` and
                ``2 * c + 1``.
            low, high: u32, of two bf16 each: [i] are row ``4 * g + i`` at two depths of the first 8 and the last 8.
            x: u32, of two bf16 each: [2 * step] and [2 * step + 1] are column g at the depths of low and of high.
            step: 0 or 1.

        Returns:
            ``sums`` with what was found added.
        """
        if self.interpret:
            rows = jnp.stack([_halves(low), _halves(high)], -1).reshape(WARPS, 8, 4, 4, 2, 2)
            columns = _halves(x)[:, 2 * step : 2 * step + 2].reshape(WARPS, 8, 4, 2, 2)
            found = jnp.einsum("wgcitd,wncdt->wgni", rows, columns, precision="highest")
            found = found.reshape(WARPS, 8, 4, 2, 4)
            return tuple(s + found[:, :, :, j].reshape(QUAD) for j, s in enumerate(sums))

        def emit(ctx: Any, first: Any, second: Any, low: Any, high: Any, x: Any) -> Any:
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import llvm

            f32 = ir.F32Type.get()
            tops, bottoms, inputs = _numbers(low), _numbers(high), _numbers(x)
            before: Any = (_numbers(first), _numbers(second))
            after: Any = ([None] * 4, [None] * 4)
            for i in (0, 2):
                a = [tops[i], tops[i + 1], bottoms[i], bottoms[i + 1]]
                b = inputs[2 * step : 2 * step + 2]
                places = [(0, i), (1, i), (0, i + 1), (1, i + 1)]
                found: Any = llvm.inline_asm(
                    llvm.StructType.get_literal([f32] * 4),
                    [*a, *b, *(before[j][row] for j, row in places)],
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                    "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                )
                for number, (j, row) in enumerate(places):
                    after[j][row] = llvm.extractvalue(f32, found, [number])
            return tuple(_quad(numbers, signed=None) for numbers in after)

        return _inline(emit, (*sums, low, high, x), (jnp.float32, jnp.float32))


def launch(
    name: str,
    kernel: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    arguments: Sequence[jax.Array],
    *,
    grid: tuple[int, ...],
    shared: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Runs a kernel of `Threads`.

    Args:
        name: in profiles.
        kernel: hashable; called with a program's place in the grid, a reference for each argument, for the result and,
            if there is any, for the shared memory.
        out: of one dimension.
        arguments: of one dimension each.
        grid: programs along three dimensions.
        shared: f32 numbers of shared memory that a program has.
        interpret: run it as XLA operations, on any device.
    """
    how = {"name": name, "kernel": kernel, "out": out, "grid": grid, "shared": shared}
    return _simulated(arguments, **how) if interpret else _launched(arguments, **how)


def _simulated(
    arguments: Sequence[jax.Array], *, name: str, kernel: Any, out: Any, grid: Any, shared: int
) -> jax.Array:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    def program(*refs: Any) -> None:
        kernel([pl.program_id(axis) for axis in range(3)], *refs)

    scratch = [mosaic_gpu.SMEM((shared,), jnp.float32)] if shared else []
    call = pl.pallas_call(program, grid=grid, out_shape=out, scratch_shapes=scratch, interpret=True, name=name)
    found: jax.Array = call(*arguments)
    return found


# Jitted: a program that has a kernel many times, once a layer, has it lowered once, which takes a second.
@partial(jax.jit, static_argnames=("name", "kernel", "out", "grid", "shared"))
def _launched(arguments: Sequence[jax.Array], *, name: str, kernel: Any, out: Any, grid: Any, shared: int) -> jax.Array:
    def call(*arguments: jax.Array) -> list[jax.Array]:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu

        def program(*refs: Any) -> None:
            place = [jax.lax.axis_index(axis) for axis in AXES]
            scratch = [mosaic_gpu.SMEM((shared,), jnp.float32)] if shared else []
            pl.run_scoped(lambda *shared: kernel(place, *refs, *shared), *scratch)

        params = mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Lane)
        found: list[jax.Array] = mosaic_gpu.kernel(
            program, out_type=[out], grid=grid, grid_names=AXES, kernel_name=name, compiler_params=params
        )(*arguments)
        return found

    (found,) = deferred(call, [out], arguments)
    return found


def _halves(quads: jax.Array) -> jax.Array:
    """The bf16 numbers of quads u32, f32 [128, 4, 2]."""
    return jax.lax.bitcast_convert_type(quads, jnp.bfloat16).astype(jnp.float32)


def _layout() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.Layout.WG_STRIDED(QUAD, vec_size=4)


def _laid_out(quads: jax.Array) -> jax.Array:
    from jax.experimental.pallas import mosaic_gpu

    found: jax.Array = mosaic_gpu.layout_cast(quads, _layout())
    return found


def _inline(emit: Callable[..., Any], arguments: Sequence[Any], dtypes: Any) -> Any:
    """What a function that builds MLIR makes of references and quads: quads of these types, in their structure."""
    from jax._src import state
    from jax.experimental.pallas import mosaic_gpu

    def is_ref(argument: Any) -> bool:
        return isinstance(jax.typeof(argument), state.AbstractRef)

    layout = _layout()
    given = [a if is_ref(a) else _laid_out(a) for a in arguments]
    types = tuple(mosaic_gpu.RefType() if is_ref(a) else layout for a in arguments)
    out = jax.tree.map(lambda dtype: mosaic_gpu.ShapeDtypeStruct(QUAD, dtype, layout=layout), dtypes)
    return mosaic_gpu.inline_mgpu(arg_types=types, return_type=out)(emit)(*given)


def _fragment(register: Any, *, signed: bool | None) -> Any:
    """Quads of an MLIR vector of each thread."""
    from jax.experimental.mosaic import gpu as mosaic

    registers = np.empty((1,), object)
    registers[0] = register
    layout = mosaic.WGStridedFragLayout(QUAD, 4)
    return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _quad(numbers: Sequence[Any], *, signed: bool | None) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    register = vector.from_elements(ir.VectorType.get((4,), numbers[0].type), list(numbers))
    return _fragment(register, signed=signed)


def _numbers(quads: Any) -> list[Any]:
    """The four numbers of quads, MLIR values."""
    from jaxlib.mlir.dialects import vector

    return [vector.extract(quads.registers.item(), [], [i]) for i in range(4)]


def _both(number: float) -> Any:
    """Two bf16 of one number, an MLIR i32."""
    from jax.experimental.mosaic import gpu as mosaic
    from jaxlib.mlir import ir

    half = np.asarray(number, jnp.bfloat16).view(np.uint16)
    word = int(np.asarray([half, half]).view(np.int32)[0])
    return mosaic.c(word, ir.IntegerType.get_signless(32))


def _fma(a: Sequence[Any], b: float, c: Sequence[Any]) -> Any:
    """Quads of ``a * b + c``, of two bf16 each."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    i32, factor = ir.IntegerType.get_signless(32), _both(b)
    found = [
        llvm.inline_asm(i32, [one, factor, other], "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r")
        for one, other in zip(a, c, strict=True)
    ]
    return _quad(found, signed=False)


def _address(ref: Any, at: Any) -> Any:
    from jax.experimental.mosaic import gpu as mosaic
    from jaxlib.mlir import ir

    return mosaic.utils.getelementptr(
        mosaic.utils.memref_ptr(ref), [_numbers(at)[0]], ir.MemRefType(ref.type).element_type
    )
