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

from llmjax.kernels.cuda.lowering import MOSAIC_ON_AMPERE, deferred
from llmjax.kernels.cuda.tuned import default_device

WARPS = 4
THREADS = 32 * WARPS
QUAD = (THREADS, 4)
AXES = ("x", "y", "z")  # of a grid


def refuses_card() -> str | None:
    """Why kernels of `Threads` do not become machine code for the card at hand; None: they do."""
    capability = str(getattr(default_device(), "compute_capability", "9.0"))  # unknown where there is no card
    if int(capability.split(".")[0]) < 9 and not MOSAIC_ON_AMPERE:
        return f"JAX {jax.__version__} compiles no such kernels for compute capability {capability}"
    return None


def when(condition: jax.Array) -> Callable[[Callable[[], None]], None]:
    """Decorates what a program does if that is true, and is called at once."""
    from jax.experimental import pallas as pl

    decorator: Callable[[Callable[[], None]], None] = pl.when(condition)
    return decorator


@dataclass(frozen=True)
class Threads:
    """The threads of a program.

    Args:
        interpret: they are simulated.
    """

    interpret: bool

    def index(self) -> jax.Array:
        """Each thread's index, i32 quads of four equal numbers."""
        if self.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, QUAD, 0)

        def emit(ctx: Any) -> Any:
            from jax.experimental.mosaic import gpu as mosaic
            from jaxlib.mlir.dialects import arith

            thread = mosaic.utils.thread_idx()
            return _quad([arith.remui(thread, mosaic.c(THREADS, thread.type))] * 4, signed=True)

        return _inline(emit, (), jnp.int32)

    def number(self) -> jax.Array:
        """Each number's place in its quad: i32 quads 0, 1, 2, 3."""
        if self.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, QUAD, 1)

        def emit(ctx: Any) -> Any:
            from jax.experimental.mosaic import gpu as mosaic
            from jaxlib.mlir import ir

            return _quad([mosaic.c(i, ir.IntegerType.get_signless(32)) for i in range(4)], signed=True)

        return _inline(emit, (), jnp.int32)

    def constant(self, value: float) -> jax.Array:
        """A quad of f32 of one number."""
        quad = jnp.full(QUAD, value, jnp.float32)
        return quad if self.interpret else _laid_out(quad)

    def load(self, ref: Any, at: jax.Array, further: int = 0, *, block: jax.Array | None = None, of: int = 0) -> Any:
        """Quads from memory.

        Args:
            ref: an array of one dimension: 32-bit numbers, or 16-bit floats or bytes, two or four of which are read
                as one u32; memory that the kernel does not write, or shared memory.
            at: i32 quads; where the first of the numbers lies, a multiple of 16 bytes.
            further: how many numbers of ref to skip from there, the same for all threads.
            block: i32 quads; how many blocks of ``of`` numbers to skip too, for arrays that i32 cannot index.
        """
        smaller = ref.dtype.itemsize < 4
        if self.interpret:
            first = at[:, :1] if block is None else at[:, :1] + block[:, :1] * of
            found = ref[first + jnp.arange(further, further + 16 // ref.dtype.itemsize, dtype=jnp.int32)]
            return jax.lax.bitcast_convert_type(found.reshape(*QUAD, -1), jnp.uint32) if smaller else found

        def emit(ctx: Any, ref: Any, at: Any, *block: Any) -> Any:
            from jax.experimental.mosaic import gpu as mosaic
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import llvm

            element = ir.MemRefType(ref.type).element_type
            address = mosaic.utils.getelementptr(_address(ref, at, *block, of=of), [further], element)
            changes = mosaic.utils.is_smem_ref(ref)
            kind = ir.IntegerType.get_signless(32) if smaller else element
            found = llvm.load(ir.VectorType.get((4,), kind), address, alignment=16, invariant=not changes)
            return _fragment(found, signed=False if isinstance(kind, ir.IntegerType) else None)

        given = (ref, at) if block is None else (ref, at, block)
        return _inline(emit, given, jnp.uint32 if smaller else ref.dtype)

    def look_up(self, ref: Any, at: jax.Array) -> jax.Array:
        """One number of each thread, four times.

        Args:
            ref: an array of one dimension, of 32-bit numbers, which the kernel does not write.
            at: i32 quads of four equal numbers; where the number lies.
        """
        if self.interpret:
            return jnp.broadcast_to(ref[at[:, :1]], QUAD)

        def emit(ctx: Any, ref: Any, at: Any) -> Any:
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import llvm

            element = ir.MemRefType(ref.type).element_type
            found = llvm.load(element, _address(ref, at), alignment=4, invariant=True)
            return _quad([found] * 4, signed=True if isinstance(element, ir.IntegerType) else None)

        return _inline(emit, (ref, at), ref.dtype)

    def store(self, ref: Any, at: jax.Array, quads: jax.Array, *, block: jax.Array | None = None, of: int = 0) -> None:
        """Quads to memory; the arguments as in `load`. Threads that name one place must have equal quads."""
        if self.interpret:
            _put(ref, at, quads, block, of)
            return

        def emit(ctx: Any, ref: Any, at: Any, quads: Any, *block: Any) -> None:
            from jaxlib.mlir.dialects import llvm

            llvm.store(quads.registers.item(), _address(ref, at, *block, of=of), alignment=16)

        _inline(emit, (ref, at, quads, *([] if block is None else [block])), None)

    def store_first(self, ref: Any, at: jax.Array, quads: jax.Array, *, block: jax.Array, of: int) -> None:
        """The first number of each quad to memory, four bytes; the arguments as in `store`."""
        if self.interpret:
            _put(ref, at, quads[:, :1], block, of)
            return

        def emit(ctx: Any, ref: Any, at: Any, quads: Any, block: Any) -> None:
            from jaxlib.mlir.dialects import llvm

            llvm.store(_numbers(quads)[0], _address(ref, at, block, of=of), alignment=4)

        _inline(emit, (ref, at, quads, block), None)

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

    def arranged(self, quads: Sequence[jax.Array], numbers: Sequence[tuple[int, int]]) -> jax.Array:
        """A quad of numbers of quads: of which, and which of it. No instruction."""
        if self.interpret:
            return jnp.stack([quads[which][:, i] for which, i in numbers], 1)

        def emit(ctx: Any, *quads: Any) -> Any:
            return _quad([_numbers(quads[which])[i] for which, i in numbers], signed=quads[0].is_signed)

        return _inline(emit, tuple(quads), quads[0].dtype)

    def turned(self, quads: Sequence[jax.Array]) -> list[jax.Array]:
        """Four quads of the numbers of four: [i] of the j-th is [j] of the i-th. No instruction."""
        return [self.arranged(quads, [(which, i) for which in range(4)]) for i in range(4)]

    def reduced(self, quads: Sequence[jax.Array], how: str, lanes: Sequence[int]) -> jax.Array:
        """One number of each of up to four f32 quads and of lanes together.

        Args:
            how: "max" or "sum".
            lanes: powers of two; lanes whose numbers differ in these bits alone have what they find in common.

        Returns:
            Quads: [i] is that of ``quads[i % len(quads)]``.
        """
        if self.interpret:
            combine = {"max": jnp.maximum, "sum": jnp.add}[how]
            found = []
            for each in quads:
                one = combine(combine(each[:, 0], each[:, 1]), combine(each[:, 2], each[:, 3]))
                for bit in lanes:
                    halves = one.reshape(-1, 2, bit)
                    one = combine(halves, halves[:, ::-1]).reshape(THREADS)
                found.append(one)
            return jnp.stack([found[i % len(found)] for i in range(4)], 1)

        def emit(ctx: Any, *quads: Any) -> Any:
            from jax.experimental.mosaic import gpu as mosaic
            from jaxlib.mlir.dialects import arith

            combine = {"max": arith.maximumf, "sum": arith.addf}[how]
            found = []
            for a, b, c, d in map(_numbers, quads):
                one = combine(combine(a, b), combine(c, d))
                for bit in lanes:
                    one = combine(one, mosaic.utils.shfl_bfly(one, bit))
                found.append(one)
            return _quad([found[i % len(found)] for i in range(4)], signed=None)

        return _inline(emit, tuple(quads), jnp.float32)

    def transposed(self, quads: jax.Array) -> jax.Array:
        """Each warp's four matrices of 8 x 8 numbers of 16 bits, transposed.

        Args:
            quads: u32, of two numbers each: [i] of lane ``4 * g + c`` are row g of the i-th matrix, columns ``2 * c``
                and ``2 * c + 1``.
        """
        if self.interpret:
            halves = jax.lax.bitcast_convert_type(quads, jnp.uint16).reshape(WARPS, 8, 4, 4, 2)
            matrices = halves.transpose(0, 3, 1, 2, 4).reshape(WARPS, 4, 8, 8).swapaxes(2, 3)
            halves = matrices.reshape(WARPS, 4, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(*QUAD, 2)
            return jax.lax.bitcast_convert_type(halves, jnp.uint32)

        def emit(ctx: Any, quads: Any) -> Any:
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import llvm

            i32, instruction = ir.IntegerType.get_signless(32), "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
            found = [llvm.inline_asm(i32, [one], instruction, "=r,r") for one in _numbers(quads)]
            return _quad(found, signed=False)

        return _inline(emit, (quads,), jnp.uint32)

    def pairs(self, low: jax.Array, high: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Numbers of f32 quads, rounded to a 16-bit float type, by twos: quads u32."""
        if self.interpret:
            return jax.lax.bitcast_convert_type(jnp.stack([low, high], -1).astype(dtype), jnp.uint32)

        def emit(ctx: Any, low: Any, high: Any) -> Any:
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import llvm

            instruction = f"cvt.rn.{_ptx(dtype)}x2.f32 $0, $1, $2;"
            found = [
                llvm.inline_asm(ir.IntegerType.get_signless(32), [second, first], instruction, "=r,f,f")
                for first, second in zip(_numbers(low), _numbers(high), strict=True)
            ]
            return _quad(found, signed=False)

        return _inline(emit, (low, high), jnp.uint32)

    def floats(self, pairs: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """The numbers of `pairs`, in f32: the low ones and the high ones."""
        if self.interpret:
            found = _halves(pairs, dtype)
            return found[..., 0], found[..., 1]

        def emit(ctx: Any, pairs: Any) -> Any:
            from jax.experimental.mosaic import gpu as mosaic
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import arith, llvm, vector

            f32, two = ir.F32Type.get(), ir.VectorType.get((2,), mosaic.utils.dtype_to_ir_type(jnp.dtype(dtype)))
            halves = [llvm.bitcast(two, pair) for pair in _numbers(pairs)]
            found = [[arith.extf(f32, vector.extract(both, [], [i])) for both in halves] for i in (0, 1)]
            return tuple(_quad(numbers, signed=None) for numbers in found)

        return _inline(emit, (pairs,), (jnp.float32, jnp.float32))

    def exp2(self, quads: jax.Array) -> jax.Array:
        """Powers of two of f32 quads, as near as the hardware comes (2 units in the last place)."""
        if self.interpret:
            return jnp.exp2(quads)

        def emit(ctx: Any, quads: Any) -> Any:
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import llvm

            f32 = ir.F32Type.get()
            found = [llvm.inline_asm(f32, [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f") for x in _numbers(quads)]
            return _quad(found, signed=None)

        return _inline(emit, (quads,), jnp.float32)

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
        self,
        sums: Sequence[jax.Array],
        low: jax.Array,
        high: jax.Array,
        x: jax.Array,
        step: int,
        dtype: Any = jnp.bfloat16,
    ) -> tuple[jax.Array, jax.Array]:
        """Products of tensor cores: of each warp's ``32 rows x 16`` with its ``16 x 8 columns``, two mma of m16n8k16.

        Of lane ``4 * g + c``, row is the number in its quads, g among each 8; with depth k = 8 * high + 2 * c + half.

        Args:
            sums: f32, two quads: [i] of the first and of the second are row ``4 * g + i``, columns ``2 * c`` and
                ``2 * c + 1``.
            low, high: u32, of two halves each: [i] are row ``4 * g + i`` at two depths of the first 8 and the last 8.
            x: u32, of two halves each: [2 * step] and [2 * step + 1] are column g at the depths of low and of high.
            step: 0 or 1.
            dtype: type of the halves, bf16 or f16.

        Returns:
            ``sums`` with what was found added.
        """
        if self.interpret:
            rows = jnp.stack([_halves(low, dtype), _halves(high, dtype)], -1).reshape(WARPS, 8, 4, 4, 2, 2)
            columns = _halves(x, dtype)[:, 2 * step : 2 * step + 2].reshape(WARPS, 8, 4, 2, 2)
            found = jnp.einsum("wgcitd,wncdt->wgni", rows, columns, precision="highest")
            found = found.reshape(WARPS, 8, 4, 2, 4)
            return tuple(s + found[:, :, :, j].reshape(QUAD) for j, s in enumerate(sums))

        def emit(ctx: Any, first: Any, second: Any, low: Any, high: Any, x: Any) -> Any:
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import llvm

            f32, kind = ir.F32Type.get(), _ptx(dtype)
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
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
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
    out: Any,
    arguments: Sequence[jax.Array],
    *,
    grid: tuple[int, ...],
    shared: int = 0,
    in_place: jax.Array | None = None,
    interpret: bool = False,
) -> Any:
    """Runs a kernel of `Threads`.

    Args:
        name: in profiles.
        kernel: hashable; called with a program's place in the grid, a reference for each argument, for each result and,
            if there is any, for the shared memory.
        out: ``ShapeDtypeStruct`` of one dimension, or a tuple of them.
        arguments: arrays of one dimension.
        grid: programs along three dimensions.
        shared: f32 numbers of shared memory that a program has.
        in_place: the memory of the result, of which there is one then, and what it begins with.
        interpret: run it as XLA operations, on any device.

    Returns:
        Arrays as ``out`` says.
    """
    single = not isinstance(out, tuple)
    call = _Call(name, kernel, (out,) if single else out, grid, shared, in_place is not None)
    given = arguments if in_place is None else [in_place, *arguments]
    results = (_simulated if interpret else _launched)(given, call=call)
    return results[0] if single else results


@dataclass(frozen=True)
class _Call:
    """What is the same whatever the arguments hold; see `launch`."""

    name: str
    kernel: Callable[..., None]
    outs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    shared: int
    in_place: bool  # the first argument is the memory of the result

    def scratch(self) -> list[Any]:
        """The shared memory of a program."""
        from jax.experimental.pallas import mosaic_gpu

        return [mosaic_gpu.SMEM((self.shared,), jnp.float32)] if self.shared else []


def _simulated(arguments: Sequence[jax.Array], *, call: _Call) -> list[jax.Array]:
    from jax.experimental import pallas as pl

    def program(*refs: Any) -> None:
        call.kernel([pl.program_id(axis) for axis in range(3)], *refs[call.in_place :])

    simulated = pl.pallas_call(
        program,
        grid=call.grid,
        out_shape=list(call.outs),
        scratch_shapes=call.scratch(),
        input_output_aliases={0: 0} if call.in_place else {},
        interpret=True,
        name=call.name,
    )
    return list(simulated(*arguments))


# Jitted: a program that has a kernel many times, once a layer, has it lowered once, which takes a second.
@partial(jax.jit, static_argnames="call")
def _launched(arguments: Sequence[jax.Array], *, call: _Call) -> list[jax.Array]:
    def launched(*arguments: jax.Array) -> list[jax.Array]:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu

        def program(*refs: Any) -> None:
            place = [jax.lax.axis_index(axis) for axis in AXES]
            pl.run_scoped(lambda *shared: call.kernel(place, *refs, *shared), *call.scratch())

        params = mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Lane)
        mesh = mosaic_gpu.Mesh(grid=call.grid, grid_names=AXES, kernel_name=call.name)

        def run(*arguments: Any, out: Any) -> Any:
            return pl.kernel(program, out_type=out, mesh=mesh, compiler_params=params, name=call.name)(*arguments)

        if not call.in_place:
            return list(run(*arguments, out=list(call.outs)))
        result, *rest = arguments
        return [pl.run_state(lambda result: run(*rest, result, out=[]))(result)]

    return deferred(launched, call.outs, arguments)


def _put(ref: Any, at: jax.Array, numbers: jax.Array, block: jax.Array | None, of: int) -> None:
    """Simulates a store of numbers [128, n], of 32 bits, as one or more smaller stores."""
    first = at[:, :1] if block is None else at[:, :1] + block[:, :1] * of
    if ref.dtype.itemsize < 4:
        numbers = jax.lax.bitcast_convert_type(numbers, ref.dtype).reshape(THREADS, -1)
    elif ref.dtype != numbers.dtype:
        numbers = jax.lax.bitcast_convert_type(numbers, ref.dtype)
    ref[first + jnp.arange(numbers.shape[1], dtype=jnp.int32)] = numbers


def _ptx(dtype: Any) -> str:
    """A 16-bit float type, as instructions name it."""
    return {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]


def _halves(quads: jax.Array, dtype: Any = jnp.bfloat16) -> jax.Array:
    """The 16-bit floats of quads u32, as f32 [128, 4, 2]."""
    return jax.lax.bitcast_convert_type(quads, dtype).astype(jnp.float32)


def _layout() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.Layout.WG_STRIDED(QUAD, vec_size=4)


def _laid_out(quads: jax.Array) -> jax.Array:
    from jax.experimental.pallas import mosaic_gpu

    laid_out: jax.Array = mosaic_gpu.layout_cast(quads, _layout())
    return laid_out


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


def _address(ref: Any, at: Any, block: Any = None, *, of: int = 0) -> Any:
    """Address of a number of an array, moved on by ``block`` blocks of ``of`` numbers: an MLIR pointer."""
    from jax.experimental.mosaic import gpu as mosaic
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    pointer, element = mosaic.utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
    if block is not None:
        i64 = ir.IntegerType.get_signless(64)
        numbers = arith.muli(arith.extsi(i64, _numbers(block)[0]), mosaic.c(of, i64))
        pointer = mosaic.utils.getelementptr(pointer, [numbers], element)
    return mosaic.utils.getelementptr(pointer, [_numbers(at)[0]], element)
