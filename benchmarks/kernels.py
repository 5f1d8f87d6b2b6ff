"""Speed of each CPU kernel and of the XLA operations it replaces, next to what the machine can read.

    python -m benchmarks.kernels [--only decode] [--repeat 30] [--isa avx2] [--megabytes 120]

Every measurement runs several layers in one compiled program and takes the fastest of its repetitions. `read GB/s` is
the memory that a call must read (pages or weights) over its time, next to the speed at which a one-row f32 product
reads as many bytes, from whichever cache or memory they fit; `GFLOP/s` counts multiplications and additions, next to
what XLA's product of large bfloat16 matrices reaches.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention import KVLayout, KVPages, RaggedBatch, make_pages, portable
from llmjax.kernels.cpu import attention as cpu_attention
from llmjax.kernels.cpu import linear as cpu_linear
from llmjax.kernels.cpu.library import Library, describe, library
from llmjax.kernels.cpu.matrices import METHODS
from llmjax.kernels.dense_linear import CPU_MIN_ROWS, linear_by_padding, linear_by_xla
from llmjax.kernels.qtensor import CPU_TILE, QTensor
from llmjax.quantization.schemes import scheme_named

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
    layers: int = LAYERS


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
LINEAR = ((576, 1536), (1536, 576), (1536, 8960), (8960, 1536))
LINEAR_ROWS = (1, 4, 8, 16, 32)
QUANTIZED = ((1536, 576), (640, 2048), (8960, 1536))
QUANTIZED_ROWS = (1, 4, 16, 64, 512)
SCHEMES = ("q4_1", "q5_0", "q8_0", "q4_k", "q6_k", "int8", "int4", "fp8")


def fastest(run: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest of ``repeat`` runs, after one that compiles."""
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
    return best


@functools.cache
def read_limit(megabytes: int) -> float:
    """Bytes a second that a one-row f32 product reads of a matrix of this size."""
    weight = jnp.ones((megabytes * 256, 1024))
    run = jax.jit(linear_by_xla)
    return weight.nbytes / fastest(lambda: run(jnp.ones((1, 1024)), weight), 20)


@functools.cache
def multiply_limit() -> float:
    """Operations a second of XLA's product of large bf16 matrices."""
    size = 2048
    x = jnp.ones((size, size), jnp.bfloat16)
    run = jax.jit(linear_by_xla)
    return 2 * size**3 / fastest(lambda: run(x, x), 10)


def limit_for(size: int) -> float:
    return read_limit(max(8, 1 << round(np.log2(size / 1e6))))


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


def attention_seconds(shape: AttentionShape, attend: Callable[..., Any], repeat: int) -> float:
    q, k, pages, batch = attention_input(shape)

    def run_layers(q: jax.Array, k: jax.Array, pages: list[KVPages], batch: RaggedBatch) -> Any:
        kept = []
        for layer in pages:
            q, layer = attend(q, k, k, layer, batch, scale=shape.head_dim**-0.5)
            kept.append(layer)
        return q, kept

    run = jax.jit(run_layers, donate_argnums=2)
    held = [pages]

    def step() -> jax.Array:
        out, held[0] = run(q, k, held[0], batch)
        return out

    return fastest(step, repeat) / LAYERS


def attention_rows(native: Library | None, repeat: int, only: str) -> Iterator[Row]:
    for shape in ATTENTION:
        if only not in f"attention {shape.name}":
            continue
        ways: dict[str, Callable[..., Any]] = {"XLA": portable_attend}
        if native:
            ways |= {f"C++ {x}": functools.partial(cpu_attention.attend, library=native, isa=x) for x in native.usable}
        layout = KVLayout.of(jnp.dtype(shape.cache), page_size=PAGE_SIZE)
        page = layout.page_bytes(num_kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        kept = (shape.requests * (shape.length - shape.common) + shape.common) * page // PAGE_SIZE
        seen = shape.requests * (shape.new * shape.length - shape.new * (shape.new - 1) // 2)
        for name, attend in ways.items():
            seconds = attention_seconds(shape, attend, max(3, repeat // 10) if name == "XLA" else repeat)
            flops = 4 * seen * shape.heads * shape.head_dim
            yield Row(f"attention {shape.name}", name, seconds, kept, flops)


def linear_seconds(
    x: jax.Array, weights: Sequence[jax.Array | QTensor], apply: Callable[..., jax.Array], repeat: int
) -> float:
    run = jax.jit(lambda x, weights: [apply(x, w) for w in weights])
    return fastest(lambda: run(x, weights), repeat) / len(weights)


def linear_rows(native: Library | None, repeat: int, only: str) -> Iterator[Row]:
    for size_out, size_in in LINEAR:
        rng = np.random.default_rng(0)
        weights = [
            jnp.asarray(rng.standard_normal((size_out, size_in), np.float32).astype(jnp.bfloat16))
            for _ in range(LAYERS)
        ]
        for rows in LINEAR_ROWS:
            operation = f"linear {rows} rows, {size_out} x {size_in}"
            if only not in operation:
                continue
            by_xla = linear_by_padding if rows < CPU_MIN_ROWS else linear_by_xla
            ways: dict[str, Callable[..., jax.Array]] = {"XLA": by_xla}
            if native:
                ways |= {f"C++ {x}": functools.partial(cpu_linear.linear, library=native, isa=x) for x in native.usable}
            x = jnp.asarray(rng.standard_normal((rows, size_in)), jnp.float32)
            for name, apply in ways.items():
                seconds = linear_seconds(x, weights, apply, repeat)
                flops, size = 2 * rows * size_in * size_out, weights[0].nbytes
                yield Row(operation, name, seconds, size, flops)


def quantized_weight(scheme: str, size_out: int, size_in: int, seed: int) -> QTensor:
    """A matrix whose codes are random and whose groups have a scale of about 1/1000."""
    form = scheme_named(scheme).format(size_in)
    words = np.random.default_rng(seed).integers(
        0, 1 << 32, (-(-size_out // CPU_TILE), form.num_words, CPU_TILE), dtype=np.uint32
    )
    if form.codes.kind in ("e4m3", "e5m2"):
        words &= 0x3F3F3F3F  # no NaN
    for entry in form.fields.values():
        plain = {"f32": 0x3A800000, "f16": 0x14001400, "bf16": 0x3A803A80}
        words[:, entry.start : entry.start + entry.num_words] = plain.get(entry.number, 0x11111111)
    return QTensor(jnp.asarray(words), None, form, size_out, jnp.dtype(jnp.bfloat16), "int8")


def quantized_rows(native: Library | None, repeat: int, only: str, isa: str | None, megabytes: int) -> Iterator[Row]:
    for scheme in SCHEMES if native else ():
        for size_out, size_in in QUANTIZED:
            weights: list[QTensor] = []
            for rows in QUANTIZED_ROWS:
                operation = f"{scheme} {rows} rows, {size_out} x {size_in}"
                if only not in operation:
                    continue
                if not weights:
                    weights = [quantized_weight(scheme, size_out, size_in, 0)]
                    layers = max(LAYERS, round(megabytes * 1e6 / weights[0].words.nbytes))
                    weights += [quantized_weight(scheme, size_out, size_in, layer) for layer in range(1, layers)]
                x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, size_in)), jnp.float32)
                for name in ("fastest", *METHODS):
                    method = None if name == "fastest" else name
                    apply = functools.partial(cpu_linear.linear, library=native, isa=isa, method=method)
                    try:
                        seconds = linear_seconds(x, weights, apply, max(3, repeat // max(1, rows // 16)))
                    except jax.errors.JaxRuntimeError as error:
                        if "the method does not take" not in str(error):
                            raise
                        continue
                    flops = 2 * rows * size_in * size_out
                    yield Row(operation, name, seconds, weights[0].words.nbytes, flops, len(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="lines whose operation holds this text")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--isa", help="for quantized matrices, instead of the best instruction set")
    parser.add_argument("--megabytes", type=int, default=0, help="of quantized matrices, at least")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    native = library()
    print(f"JAX {jax.__version__}, {describe()}\n")
    print(f"| {'operation':36} | {'by':13} | {'µs':>8} | read GB/s | limit | of limit | GFLOP/s | of limit |")
    print(f"|{'-' * 38}|{'-' * 15}|{'-' * 9}:|----------:|------:|---------:|--------:|---------:|")
    quantized = functools.partial(quantized_rows, isa=arguments.isa, megabytes=arguments.megabytes)
    for rows in (attention_rows, linear_rows, quantized):
        for row in rows(native, arguments.repeat, arguments.only):
            read, multiplied = row.bytes_read / row.seconds, row.flops / row.seconds
            limit = limit_for(row.bytes_read * row.layers)
            print(
                f"| {row.operation:36} | {row.implementation:13} | {row.seconds * 1e6:8.1f} | {read / 1e9:9.1f} |"
                f" {limit / 1e9:5.1f} | {read / limit:8.0%} | {multiplied / 1e9:7.0f} |"
                f" {multiplied / multiply_limit():8.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
