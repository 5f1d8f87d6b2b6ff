"""Speed on a GPU, next to what the card can do: its copies, its matrix products, the kernels, whole models.

    python -m benchmarks.gpu [--only kernels,models] [--shapes llama-8b] [--formats bfloat16,q4_k] [--output FILE]

Needs nothing but the card: weights are random. Limits are measured on the card itself, by a copy of 1 GiB and a product
of 8192 x 8192 matrices in bfloat16, and every other figure stands next to its bound, the larger of bytes over bandwidth
and operations over matmul rate. Figures are the fastest of several runs. ``--small`` takes sizes for a try-out on any
machine. ``--compare PYTHON`` adds transformers with torch.compile and CUDA graphs, as that interpreter has it; it runs
first, while nothing else holds the card's memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.random_model import SHAPES, Shape, write_random_model
from benchmarks.scaling import bytes_of_weights, first_token_seconds, step_seconds
from kernels.attention import ATTENTION, RaggedBatch, make_pages
from kernels.dense_linear import LINEAR
from kernels.qtensor import CPU_TILE, CUDA_TILE, Codes, QTensor, RowFormat
from kernels.quantized_linear import QUANTIZED_LINEAR
from llmjax import LLM, SamplingParams
from llmjax.errors import LLMJaxError

PAGE = 16
PARTS = ("kernels", "models")
# Sizes of Llama-3.1-8B and Qwen3-8B; embeddings are tied here, which changes nothing of what a step reads.
MODELS = {
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 151936),
    **SHAPES,
}
FORMATS = {
    "4 bits, groups of 128": lambda size_in: RowFormat(size_in, Codes(4), 128, "f16", zero="u8"),
    "q4_k": lambda size_in: RowFormat(size_in, Codes(4), 32, "u8", minimum="u8", super_size=256),
    "8 bits, by row": lambda size_in: RowFormat(size_in, Codes(8, "int"), -(-size_in // 16) * 16, "f32"),
}


@dataclass(frozen=True)
class Sizes:
    """What is measured, and how often."""

    copy_mib: int = 1024
    matmul: int = 8192
    matrices: tuple[tuple[int, int], ...] = ((4096, 4096), (14336, 4096), (4096, 14336))
    rows: tuple[int, ...] = (1, 2, 8, 16, 64, 256, 2048)
    layers: int = 16  # distinct inputs of a kernel: more than the card's cache holds
    calls: int = 20  # on their way at once, so that the host's time does not count
    attention: tuple[tuple[int, int], ...] = ((1, 512), (1, 4096), (16, 4096), (64, 2048))  # requests, context
    prefill: tuple[int, ...] = (512, 4096)
    context: tuple[int, ...] = (512, 4096)
    streams: tuple[int, ...] = (16, 64, 256)


SMALL = Sizes(64, 512, ((256, 256),), (1, 8), 2, 2, ((2, 64),), (64,), (48,), (2,))


@dataclass(frozen=True)
class Limits:
    """What the card does at best."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, work: Work) -> float:
        return max(work.bytes / self.bytes_per_second, work.flops / self.flops_per_second)


@dataclass(frozen=True)
class Work:
    """What must be read, written and computed at least."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    implementation: str
    seconds: float
    work: Work
    tokens: int = 0


def fastest(run: Callable[[], Any], calls: int, repeat: int = 5) -> float:
    """Seconds of a call where many are on their way, after one that compiles."""
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def measure_limits(sizes: Sizes) -> Limits:
    x = jnp.zeros(sizes.copy_mib << 18, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    a = jnp.ones((sizes.matmul, sizes.matmul), jnp.bfloat16)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.bfloat16))
    return Limits(
        bytes_per_second=2 * x.nbytes / fastest(lambda: copy(x), sizes.calls),
        flops_per_second=2 * sizes.matmul**3 / fastest(lambda: product(a), sizes.calls),
    )


def products(sizes: Sizes) -> Iterator[Figure]:
    """Products of x with plain and quantised matrices."""
    platform = jax.devices()[0].platform
    rng = np.random.default_rng(0)

    def plain(size_out: int, size_in: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((size_out, size_in), np.float32), jnp.bfloat16)

    def quantised(form: RowFormat, size_out: int) -> QTensor:
        tile = CUDA_TILE if platform == "gpu" else CPU_TILE
        # Codes and scales of one pattern: small numbers in every type, whatever the bits mean.
        words = np.full((-(-size_out // tile), form.num_words, tile), 0x3C003C00, np.uint32)
        return QTensor(jnp.asarray(words), None, form, size_out, jnp.dtype(jnp.bfloat16))

    for size_out, size_in in sizes.matrices:
        weights: dict[str, list[Any]] = {"bf16": [plain(size_out, size_in) for _ in range(sizes.layers)]}
        for name, form in FORMATS.items():
            weights[name] = [quantised(form(size_in), size_out) for _ in range(sizes.layers)]
        for rows in sizes.rows:
            x = jnp.asarray(rng.standard_normal((rows, size_in), np.float32), jnp.bfloat16)
            for name, layers in weights.items():
                operation = LINEAR if name == "bf16" else QUANTIZED_LINEAR
                run = jax.jit(lambda x, layers, operation=operation: [operation(x, layer, None) for layer in layers])
                seconds = fastest(partial(run, x, layers), sizes.calls) / sizes.layers
                yield Figure(
                    f"{rows} x {size_in} by {size_out}, {name}",
                    operation.explain(platform, x, layers[0], None),
                    seconds,
                    Work(layers[0].nbytes + 2 * rows * (size_in + size_out), 2 * rows * size_in * size_out),
                )


def attentions(sizes: Sizes) -> Iterator[Figure]:
    """Attention of a layer with Llama's heads: decodes, and prefills of one prompt."""
    heads, kv_heads, head_dim = 32, 8, 128
    cases = [(f"decode, {n} x {length}", n, length, 1) for n, length in sizes.attention]
    cases += [(f"prefill of {length}", 1, length, length) for length in sizes.prefill]
    for cache in ("bfloat16", "int8", "float8_e4m3fn"):
        for name, requests, length, new in cases:
            per_row = -(-length // PAGE)
            table = 1 + np.arange(requests * per_row, dtype=np.int32).reshape(requests, per_row)
            position = np.arange(length - new, length)
            slots = table[:, position // PAGE] * PAGE + position % PAGE
            batch = RaggedBatch(
                query_start=jnp.arange(requests + 1, dtype=jnp.int32) * new,
                kv_len=jnp.full(requests, length, jnp.int32),
                page_table=jnp.asarray(table),
                slots=jnp.asarray(slots.reshape(-1), jnp.int32),
                decode=new == 1,
            )
            layers = [
                make_pages(
                    num_pages=table.size + 1,
                    page_size=PAGE,
                    num_kv_heads=kv_heads,
                    head_dim=head_dim,
                    dtype=jnp.dtype(cache),
                )
                for _ in range(sizes.layers)
            ]
            q = jnp.ones((requests * new, heads, head_dim), jnp.bfloat16)
            k = jnp.ones((requests * new, kv_heads, head_dim), jnp.bfloat16)

            def step(q: jax.Array, k: jax.Array, layers: list[Any], batch: RaggedBatch) -> tuple[list[Any], list[Any]]:
                rules = {"scale": head_dim**-0.5, "window": None, "softcap": None}
                found = [ATTENTION(q, k, k, pages, batch, None, **rules) for pages in layers]
                return [out for out, _ in found], [pages for _, pages in found]

            program, state = jax.jit(step, donate_argnums=2), [layers]

            def run(program: Any = program, state: Any = state, q: Any = q, k: Any = k, batch: Any = batch) -> Any:
                out, state[0] = program(q, k, state[0], batch)
                return out, state[0]

            picked = ATTENTION.explain(
                jax.devices()[0].platform, q, k, k, layers[0], batch, None, scale=1.0, window=None, softcap=None
            )
            seen = new * length - new * (new - 1) // 2  # keys of all queries of a request
            read = layers[0].layout.page_bytes(num_kv_heads=kv_heads, head_dim=head_dim) * per_row * requests
            work = Work(read + 2 * q.nbytes, 4 * requests * seen * heads * head_dim)
            yield Figure(f"{name}, {cache}", picked, fastest(run, sizes.calls) / sizes.layers, work)


def model_figures(
    folder: Path, shape_name: str, quantization: str, sizes: Sizes, extra: dict[str, Any]
) -> Iterator[Figure]:
    """Decode of one stream and of many, and prefill, of a model with random weights."""
    shape = MODELS[shape_name]
    longest = max(*sizes.context, *sizes.prefill) + 40
    write_random_model(folder / shape_name, shape, max_position_embeddings=1 << 20)
    llm = LLM(
        str(folder / shape_name),
        skip_tokenizer_init=True,
        quantization=None if quantization == "bfloat16" else quantization,
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=max(sizes.streams),
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        **extra,
    )
    rng = np.random.default_rng(0)
    try:
        llm.warm_up()
        weights = bytes_of_weights(llm)
        numbers = sum(int(np.prod(size)) for size in shape.tensors().values())
        kv_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 2

        def outputs(streams: int, length: int, new: int) -> list[Any]:
            prompts = [rng.integers(1, shape.vocab_size, length).tolist() for _ in range(streams)]
            params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
            return llm.generate(prompts, params, use_tqdm=False)

        name = f"{shape_name}, {quantization}"
        for streams, context in [*((1, n) for n in sizes.context), *((n, sizes.context[0]) for n in sizes.streams)]:
            seconds = min(step_seconds(outputs(streams, context - 32, 32)) for _ in range(3))
            work = Work(weights + streams * context * kv_token, 2 * numbers * streams)
            yield Figure(f"{name}: decode, {streams} x {context}", "engine", seconds, work, streams)
        for length in sizes.prefill:
            seconds = min(first_token_seconds(outputs(1, length, 1)[0]) for _ in range(3))
            yield Figure(f"{name}: prefill of {length}", "engine", seconds, Work(weights, 2 * numbers * length), length)
    finally:
        llm.close()


def of_transformers(interpreter: str, shape_name: str, sizes: Sizes) -> list[Figure]:
    """The same points by transformers, in bfloat16.

    Raises:
        LLMJaxError: the interpreter cannot run it.
    """
    shape = MODELS[shape_name]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {name: getattr(shape, name) for name in (*names, "vocab_size")} | {"tie_word_embeddings": True}
    # -P: the folder of the script has modules whose names transformers looks for.
    command = [interpreter, "-P", str(Path(__file__).with_name("gpu_transformers.py")), json.dumps(config)]
    for name, values in (("context", sizes.context), ("streams", sizes.streams), ("prefill", sizes.prefill)):
        command += [f"--{name}", *map(str, values)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise LLMJaxError(f"--compare: {interpreter} ended with {done.returncode}; what it printed is above")
    numbers = sum(int(np.prod(size)) for size in shape.tensors().values())
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [
        Figure(
            f"{shape_name}: {entry['name']}",
            "transformers",
            entry["seconds"],
            Work(2 * numbers, 2 * numbers * entry["tokens"]),
            entry["tokens"],
        )
        for entry in found
    ]


def table_of(figures: Sequence[Figure], limits: Limits) -> Table:
    table = Table(box=box.MARKDOWN)
    for title in ("", "by", "ms", "tok/s", "GB/s", "TFLOP/s", "of the bound"):
        table.add_column(title, justify="left" if title in ("", "by") else "right")
    for figure in figures:
        table.add_row(
            figure.name,
            figure.implementation,
            f"{figure.seconds * 1e3:.4g}",
            f"{figure.tokens / figure.seconds:,.0f}" if figure.tokens else "",
            f"{figure.work.bytes / figure.seconds / 1e9:,.0f}",
            f"{figure.work.flops / figure.seconds / 1e12:.4g}",
            f"{limits.seconds(figure.work) / figure.seconds:.0%}",
        )
    return table


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--shapes", default="llama-8b,qwen3-8b", help=f"models, of {', '.join(MODELS)}")
    parser.add_argument("--formats", default="bfloat16,q8_0,q4_k", help="bfloat16 or what --quantization takes")
    parser.add_argument("--work-dir", default=str(Path(tempfile.gettempdir()) / "llmjax-gpu"), help="for weights")
    parser.add_argument("--small", action="store_true", help="sizes for a try-out")
    parser.add_argument("--compare", metavar="PYTHON", help="an interpreter that has torch and transformers")
    parser.add_argument("--output", help="file for all figures as JSON, in benchmarks/results/ to be quoted")
    options = parser.parse_args(argv)
    parts, shapes = options.only.split(","), options.shapes.split(",")
    for given, known in ((parts, PARTS), (shapes, MODELS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    sizes = SMALL if options.small else Sizes()
    peers = [figure for name in shapes if options.compare for figure in of_transformers(options.compare, name, sizes)]
    device = jax.devices()[0]
    limits = measure_limits(sizes)
    about = {
        "card": device.device_kind,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("llmjax", "jax", "jaxlib")},
        "limits": asdict(limits),
    }
    console = Console(width=160)
    console.print(
        f"{device.device_kind}: copies {limits.bytes_per_second / 1e9:,.0f} GB/s, bf16 products "
        f"{limits.flops_per_second / 1e12:.4g} TFLOP/s; {about['versions']}; {about['date']}",
        highlight=False,
    )
    figures: list[Figure] = []

    def show(found: Iterator[Figure]) -> None:
        new = list(found)
        console.print(table_of(new, limits))
        figures.extend(new)

    if peers:
        show(iter(peers))
    if "kernels" in parts:
        show(products(sizes))
        show(attentions(replace(sizes, layers=min(sizes.layers, 8))))
    if "models" in parts:
        extra: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 26} if options.small else {}
        for shape in shapes:
            for quantization in options.formats.split(","):
                show(model_figures(Path(options.work_dir), shape, quantization, sizes, extra))
    if options.output:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_text(json.dumps({**about, "figures": [asdict(f) for f in figures]}, indent=2))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"gpu: error: {error}")
