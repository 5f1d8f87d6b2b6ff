"""Speed of each CPU kernel and of the XLA operations it replaces, next to what the machine can read.

    python -m benchmarks.kernels [--only decode] [--repeat 30]
    python -m benchmarks.kernels --formats q4_0 bf16 --rows 1 8 16 --isa avx2 amx [--method fastest] [--megabytes 120]

Every measurement runs several layers in one compiled program and takes the fastest of its repetitions. What a line is
compared with is measured in turns with it, on as many threads: `read GB/s`, the memory that a call must read (pages or
weights) over its time, with a loop that only reads as many bytes, from whichever cache or memory they fit; `GFLOP/s`,
which counts multiplications and additions, with a loop that only multiplies registers of the numbers that the method
multiplies, with the same instruction set (`benchmarks/limits.cc`).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.limits import KINDS, limits
from benchmarks.machine import this_machine
from llmjax.engine.tuning.measure import Product
from llmjax.engine.tuning.measure_main import random_weight
from llmjax.kernels.attention import KVLayout, KVPages, RaggedBatch, make_pages, portable
from llmjax.kernels.cpu import attention as cpu_attention
from llmjax.kernels.cpu import linear as cpu_linear
from llmjax.kernels.cpu.library import Library, describe, forced_isa, library
from llmjax.kernels.cpu.matrices import METHODS
from llmjax.kernels.dense_linear import CPU_MIN_ROWS, linear_by_padding, linear_by_xla
from llmjax.kernels.qtensor import QTensor
from llmjax.quantization.schemes import scheme_named
from llmjax.tune.attention import run_of_layers

LAYERS = 8
PAGE_SIZE = 16


@dataclass(frozen=True)
class Row:
    """One line of the table: a kernel on one input."""

    operation: str
    implementation: str
    seconds: float  # a layer
    bytes_read: int
    flops: int
    read_limit: float  # bytes a second of a plain loop
    multiply_limit: float  # operations a second


@dataclass(frozen=True)
class AttentionShape:
    name: str
    requests: int
    length: int
    new: int  # tokens of each request in this step
    heads: int
    kv_heads: int
    head_dim: int
    cache: str = "bfloat16"
    common: int = 0  # leading tokens of all requests, which are on the same pages


ATTENTION = (
    AttentionShape("decode 1 x 512", 1, 512, 1, 9, 3, 64),
    AttentionShape("decode 16 x 512", 16, 512, 1, 9, 3, 64),
    AttentionShape("decode 16 x 512, f32", 16, 512, 1, 9, 3, 64, "float32"),
    AttentionShape("decode 16 x 512, int8", 16, 512, 1, 9, 3, 64, "int8"),
    AttentionShape("decode 16 x 512, e4m3", 16, 512, 1, 9, 3, 64, "float8_e4m3fn"),
    AttentionShape("decode 1 x 8192", 1, 8192, 1, 9, 3, 64),
    *(
        AttentionShape(
            f"decode 16 x 4224, {cache}{', one prompt' if common else ''}", 16, 4224, 1, 9, 3, 64, cache, common
        )
        for cache in ("bfloat16", "float32", "int8")
        for common in (0, 4096)
    ),
    AttentionShape("decode 4 x 2048, h 128", 4, 2048, 1, 16, 8, 128),
    AttentionShape("decode 4 x 2048, h 128, int8", 4, 2048, 1, 16, 8, 128, "int8"),
    AttentionShape("prefill 512", 1, 512, 512, 9, 3, 64),
    AttentionShape("prefill 512, f32", 1, 512, 512, 9, 3, 64, "float32"),
    AttentionShape("prefill 512, int8", 1, 512, 512, 9, 3, 64, "int8"),
    AttentionShape("prefill 512 after 3584", 1, 4096, 512, 9, 3, 64),
)
PLAIN = "bf16"
PLAIN_SIZES = ((576, 1536), (1536, 576), (1536, 8960), (8960, 1536))
PLAIN_ROWS = (1, 4, 8, 16, 32)
QUANTIZED_SIZES = ((1536, 576), (640, 2048), (8960, 1536))
QUANTIZED_ROWS = (1, 4, 16, 64, 512)
FORMATS = (PLAIN, "q4_1", "q5_0", "q8_0", "q4_k", "q6_k", "int8", "int4", "fp8")
FASTEST = "fastest"  # the method that the library chooses
KIND_OF_METHOD = {"float": "f32", "int8": "int8", "bf16": "bf16", "int16": "int16"}


@dataclass(frozen=True)
class Way:
    """One implementation of an operation.

    Attributes:
        run: one call, all layers.
        kind: numbers that it multiplies, one of `KINDS`; None: unknown, so that the fastest of all is its limit.
    """

    run: Callable[[], object]
    isa: str
    kind: str | None


def in_turns(
    operation: str, ways: Mapping[str, Way], repeat: int, *, layers: int, bytes_read: int, flops: int
) -> Iterator[Row]:
    """The fastest of ``repeat`` runs of each way, and the limits beside them.

    Args:
        bytes_read, flops: bytes that a layer reads, and its operations.
    """
    seconds = dict.fromkeys(ways, float("inf"))
    kinds = {(way.isa, kind) for way in ways.values() for kind in ((way.kind,) if way.kind else KINDS)}
    multiply = dict.fromkeys(kinds, 0.0)
    read = 0.0
    for way in ways.values():
        jax.block_until_ready(way.run())  # which compiles
    for turn in range(repeat):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way.run())
            seconds[name] = min(seconds[name], time.perf_counter() - start)
        if turn % 3 == 0:
            read = max(read, limits(next(iter(ways.values())).isa).read(bytes_read * layers))
            multiply = {(isa, kind): max(fast, limits(isa).multiply(kind)) for (isa, kind), fast in multiply.items()}
    for name, way in ways.items():
        most = max(multiply[way.isa, kind] for kind in ((way.kind,) if way.kind else KINDS))
        yield Row(operation, name, seconds[name] / layers, bytes_read, flops, read, most)


def attention_input(shape: AttentionShape) -> tuple[jax.Array, jax.Array, list[KVPages], RaggedBatch]:
    rng = np.random.default_rng(0)
    per_row = -(-shape.length // PAGE_SIZE)
    table = 1 + np.arange(shape.requests * per_row, dtype=np.int32).reshape(shape.requests, per_row)
    table[:, : shape.common // PAGE_SIZE] = table[0, : shape.common // PAGE_SIZE]
    position = np.arange(shape.length - shape.new, shape.length)
    kv_index = table[:, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    batch = RaggedBatch(
        query_start=jnp.arange(shape.requests + 1, dtype=jnp.int32) * shape.new,
        kv_len=jnp.full(shape.requests, shape.length, jnp.int32),
        page_table=jnp.asarray(table),
        kv_index=jnp.asarray(kv_index.reshape(-1), jnp.int32),
        decode=shape.new == 1,
    )
    pages = make_pages(
        num_pages=table.size + 1,
        page_size=PAGE_SIZE,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=jnp.dtype(shape.cache),
        as_bits=True,
    )
    every = jnp.arange((table.size + 1) * PAGE_SIZE)
    values = jnp.asarray(rng.standard_normal((len(every), shape.kv_heads, shape.head_dim)), jnp.float32)
    filled = portable.write_kv(pages, values, values, every)
    layers = [filled.with_data(filled.data.copy()) for _ in range(LAYERS)]
    tokens = shape.requests * shape.new
    q = jnp.asarray(rng.standard_normal((tokens, shape.heads, shape.head_dim)), jnp.float32)
    k = jnp.asarray(rng.standard_normal((tokens, shape.kv_heads, shape.head_dim)), jnp.float32)
    return q, k, layers, batch


def portable_attend(q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: RaggedBatch, **rules: Any) -> Any:
    pages = portable.write_kv(pages, k, v, batch.kv_index)
    return portable.ragged_paged_attention(q, pages, batch, **rules), pages


def attention_run(shape: AttentionShape, attend: Callable[..., Any]) -> Callable[[], object]:
    q, k, pages, batch = attention_input(shape)
    run = run_of_layers(attend, q, k, pages, batch, scale=shape.head_dim**-0.5)
    return lambda: run()[0]


def with_isa(isa: str, run: Callable[[], object]) -> Callable[[], object]:
    """A call whose C++ kernels take an instruction set."""

    def forced() -> object:
        with forced_isa(isa):
            return jax.block_until_ready(run())

    return forced


def attention_rows(native: Library | None, isas: Sequence[str], repeat: int, only: str) -> Iterator[Row]:
    for shape in ATTENTION:
        if only not in f"attention {shape.name}":
            continue
        ways = {"XLA": Way(attention_run(shape, portable_attend), best_set(native), "bf16")}
        for isa in isas if native else ():
            ways[f"C++ {isa}"] = Way(with_isa(isa, attention_run(shape, cpu_attention.attend)), isa, "bf16")
        layout = KVLayout.of(jnp.dtype(shape.cache), page_size=PAGE_SIZE)
        page = layout.page_bytes(num_kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        bytes_held = (shape.requests * (shape.length - shape.common) + shape.common) * page // PAGE_SIZE
        seen = shape.requests * (shape.new * shape.length - shape.new * (shape.new - 1) // 2)
        flops = 4 * seen * shape.heads * shape.head_dim
        operation = f"attention {shape.name}"
        yield from in_turns(operation, ways, repeat, layers=LAYERS, bytes_read=bytes_held, flops=flops)


def product_run(
    x: jax.Array, weights: Sequence[jax.Array | QTensor], apply: Callable[..., jax.Array]
) -> Callable[[], object]:
    run = jax.jit(lambda x, weights: [apply(x, w) for w in weights])
    return lambda: run(x, weights)


def plain_ways(
    x: jax.Array, weights: Sequence[jax.Array], native: Library | None, isas: Sequence[str]
) -> dict[str, Way]:
    """Products with matrices of bf16."""
    by_xla = linear_by_padding if x.shape[0] < CPU_MIN_ROWS else linear_by_xla
    ways = {"XLA": Way(product_run(x, weights, by_xla), best_set(native), "bf16")}
    native_run = product_run(x, weights, cpu_linear.linear)
    for isa in isas if native else ():
        ways[f"C++ {isa}"] = Way(with_isa(isa, native_run), isa, None)
    return ways


def quantized_weight(scheme: str, size_out: int, size_in: int, seed: int) -> QTensor:
    """A matrix whose codes are random and whose groups have a scale of about 1/1000."""
    form = scheme_named(scheme).format(size_in)
    product = Product("", (), (size_out, size_in), form, "bfloat16", "int8")
    weight = random_weight(product, size_out, seed=seed)
    assert isinstance(weight, QTensor)
    return weight


def quantized_ways(
    x: jax.Array, weights: Sequence[QTensor], isas: Sequence[str], methods: Sequence[str]
) -> dict[str, Way]:
    """Products by each method that takes the codes and that an instruction set has."""
    ways = {}
    runs = {
        name: product_run(x, weights, functools.partial(cpu_linear.linear, method=None if name == FASTEST else name))
        for name in methods
    }
    for isa in isas:
        for name in methods:
            method = None if name == FASTEST else name
            run = with_isa(isa, runs[name])
            try:
                run()
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                if "the method does not take" not in str(error):
                    raise
                continue
            ways[f"{isa} {name}"] = Way(run, isa, method and KIND_OF_METHOD[method.partition(" ")[0]])
    return ways


def random_weights(form: str, size_out: int, size_in: int, megabytes: int) -> list[Any]:
    """Matrices of one format, as many as fill the memory that is wanted."""

    def one(layer: int) -> jax.Array | QTensor:
        if form != PLAIN:
            return quantized_weight(form, size_out, size_in, layer)
        rng = np.random.default_rng(layer)
        return jnp.asarray(rng.standard_normal((size_out, size_in), np.float32).astype(jnp.bfloat16))

    first = one(0)
    layers = max(LAYERS, round(megabytes * 1e6 / stored_bytes(first)))
    return [first, *(one(layer) for layer in range(1, layers))]


def stored_bytes(weight: jax.Array | QTensor) -> int:
    return int(weight.words.nbytes if isinstance(weight, QTensor) else weight.nbytes)


def product_rows(native: Library | None, isas: Sequence[str], arguments: argparse.Namespace) -> Iterator[Row]:
    for form in arguments.formats:
        if native is None and form != PLAIN:
            continue
        for size_out, size_in in PLAIN_SIZES if form == PLAIN else QUANTIZED_SIZES:
            weights: list[Any] = []
            for rows in arguments.rows or (PLAIN_ROWS if form == PLAIN else QUANTIZED_ROWS):
                operation = f"{form} {rows} rows, {size_out} x {size_in}"
                if arguments.only not in operation:
                    continue
                weights = weights or random_weights(form, size_out, size_in, arguments.megabytes)
                x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, size_in)), jnp.float32)
                if form == PLAIN or native is None:
                    ways = plain_ways(x, weights, native, isas)
                else:
                    ways = quantized_ways(x, weights, isas, arguments.method)
                repeat = max(3, arguments.repeat // max(1, rows // 16))
                size, flops = stored_bytes(weights[0]), 2 * rows * size_in * size_out
                yield from in_turns(operation, ways, repeat, layers=len(weights), bytes_read=size, flops=flops)


def best_set(native: Library | None) -> str:
    """What XLA compiles for."""
    return "generic" if native is None else native.usable[-1]


def instruction_sets(native: Library | None, wanted: Sequence[str] | None) -> list[str]:
    """The instruction sets to measure: the best one if none is named; "all" are all that this machine has.

    Raises:
        SystemExit: the library or the machine lacks one.
    """
    if native is None:
        return ["generic"]
    if not wanted:
        return [native.best]
    if "all" in wanted:
        return list(native.usable)
    missing = [isa for isa in wanted if isa not in native.usable]
    if missing:
        raise SystemExit(f"no {', '.join(missing)} here; there is: {', '.join(native.usable)}, all")
    return list(wanted)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="lines whose operation holds this text")
    parser.add_argument("--repeat", type=int, default=30, help="runs of which the fastest counts (%(default)s)")
    parser.add_argument("--isa", nargs="+", help="instruction sets, or all (the best one)")
    parser.add_argument("--formats", nargs="+", help=f"of matrices; without attention then ({' '.join(FORMATS)})")
    parser.add_argument("--rows", nargs="+", type=int, help="of x (some from 1 to 512)")
    methods = [FASTEST, *METHODS]
    parser.add_argument("--method", nargs="+", default=methods, choices=methods, help="of quantized products (all)")
    parser.add_argument("--megabytes", type=int, default=0, help="of matrices, at least (%(default)s)")
    arguments = parser.parse_args()
    arguments.attention = arguments.formats is None
    arguments.formats = arguments.formats or FORMATS
    return arguments


def main() -> None:
    arguments = parse_arguments()
    jax.config.update("jax_platforms", "cpu")
    native = library()
    isas = instruction_sets(native, arguments.isa)
    print(f"{this_machine()}; JAX {jax.__version__}, {describe()}\n")
    print(f"| {'operation':36} | {'by':24} | {'µs':>8} | read GB/s | of loop | GFLOP/s | of loop |")
    print(f"|{'-' * 38}|{'-' * 26}|{'-' * 9}:|----------:|--------:|--------:|--------:|")
    attention = attention_rows(native, isas, arguments.repeat, arguments.only) if arguments.attention else ()
    for row in itertools.chain(attention, product_rows(native, isas, arguments)):
        read, multiplied = row.bytes_read / row.seconds, row.flops / row.seconds
        print(
            f"| {row.operation:36} | {row.implementation:24} | {row.seconds * 1e6:8.1f} | {read / 1e9:9.1f} |"
            f" {read / row.read_limit:7.0%} | {multiplied / 1e9:7.0f} | {multiplied / row.multiply_limit:7.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
