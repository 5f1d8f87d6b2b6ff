"""Speed on a GPU, next to what the card can do: its copies, its matrix products, the kernels, whole models.

    python -m benchmarks.gpu [--only kernels,models] [--shapes llama-8b] [--formats bfloat16,q4_k] [--graphs auto,off]

Needs nothing but the card: weights are random. Limits are measured on the card itself, by a copy of 1 GiB and a product
of 8192 x 8192 matrices in bfloat16, and every other figure stands next to its bound, the larger of bytes over bandwidth
and operations over matmul rate. Figures are the fastest of several runs. ``--small`` takes sizes for a try-out on any
machine. ``--compare PYTHON`` adds transformers with torch.compile and CUDA graphs, as that interpreter has it; it runs
first, while nothing else holds the card's memory.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import chain, count, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks.gpu_figures import (
    SMALL,
    Figure,
    Sizes,
    Work,
    fastest,
    head,
    many_times,
    measure_limits,
    row_of,
    tied,
    with_each,
)
from benchmarks.gpu_models import MODELS, Setup, model_figures, of_transformers
from benchmarks.machine import commit
from benchmarks.random_model import MoEShape
from llmjax.config import EngineConfig
from llmjax.errors import LLMJaxError
from llmjax.kernels.attention import ATTENTION, KVPages, RaggedBatch, make_pages
from llmjax.kernels.attention.portable import write_kv
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.cuda.attention import store_kv
from llmjax.kernels.dense_linear import LINEAR
from llmjax.kernels.experts import EXPERTS
from llmjax.kernels.qtensor import CPU_TILE, CUDA_TILE, QTensor
from llmjax.kernels.quantized_linear import QUANTIZED_LINEAR
from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.platforms import nvidia_cards, select_platform

PAGE = EngineConfig().page_size
PARTS = ("kernels", "models")
RESULTS = Path(__file__).parent / "results"
CACHES = ("bfloat16", "int8", "float8_e4m3fn")
FORMATS = {
    "4 bits, groups of 128": lambda size_in: RowFormat(size_in, Codes(4), 128, "f16", zero="u8"),
    "q4_k": lambda size_in: RowFormat(size_in, Codes(4), 32, "u8", minimum="u8", super_size=256),
    "8 bits, by row": lambda size_in: RowFormat(size_in, Codes(8, "int"), -(-size_in // 16) * 16, "f32"),
}


def plain(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)


def quantized(form: RowFormat, *shape: int, tile: int = 0) -> QTensor:
    """A matrix, or a stack, of this shape: codes and scales of one pattern, small numbers whatever the bits mean.

    Args:
        tile: rows that are interleaved; 0: as this device's kernels read them.
    """
    tile = tile or (CUDA_TILE if jax.devices()[0].platform == "gpu" else CPU_TILE)
    words = np.full((*shape[:-1], -(-shape[-1] // tile), form.num_words, tile), 0x3C003C00, np.uint32)
    return QTensor(jnp.asarray(words), None, form, shape[-1], jnp.dtype(jnp.bfloat16))


def products(sizes: Sizes) -> Iterator[Figure]:
    """Products of x with plain and quantized matrices."""
    platform = jax.devices()[0].platform
    rng = np.random.default_rng(0)

    for size_out, size_in in sizes.matrices:
        weights: dict[str, list[Any]] = {"bf16": [plain(rng, size_out, size_in) for _ in range(sizes.layers)]}
        for name, form in FORMATS.items():
            weights[name] = [quantized(form(size_in), size_out) for _ in range(sizes.layers)]
        for rows in sizes.rows:
            x = jnp.asarray(rng.standard_normal((rows, size_in), np.float32), jnp.bfloat16)
            for name, layers in weights.items():
                operation = LINEAR if name == "bf16" else QUANTIZED_LINEAR
                run = with_each(operation, x, layers, None, times=sizes.times)
                seconds = fastest(run, sizes.calls) / (sizes.times * sizes.layers)
                yield Figure(
                    f"{rows} x {size_in} by {size_out}, {name}",
                    operation.explain(platform, x, layers[0], None),
                    seconds,
                    Work(layers[0].nbytes + 2 * rows * (size_in + size_out), 2 * rows * size_in * size_out),
                )


def attentions(sizes: Sizes) -> Iterator[Figure]:
    """Attention of a layer with Llama's heads: decodes of requests of one length, and beside a long one; prefills."""
    heads, kv_heads, head_dim = 32, 8, 128
    cases = [(f"decode, {n} x {length}", [length] * n, 1) for n, length in sizes.attention]
    for n, length, longest in sizes.uneven:
        cases.append((f"decode, {n} x {length} beside {longest}", [length] * n + [longest], 1))
    cases += [(f"prefill of {length}", [length], length) for length in sizes.prefill]
    for cache in CACHES:
        for name, lengths, new in cases:
            batch, num_pages = batch_of(lengths, new)
            requests = len(lengths)
            layers = [
                make_pages(
                    num_pages=num_pages + 1,
                    page_size=PAGE,
                    num_kv_heads=kv_heads,
                    head_dim=head_dim,
                    dtype=jnp.dtype(cache),
                )
                for _ in range(sizes.layers)
            ]
            q = jnp.ones((requests * new, heads, head_dim), jnp.bfloat16)
            k = jnp.ones((requests * new, kv_heads, head_dim), jnp.bfloat16)

            def step(state: Any, k: jax.Array, batch: RaggedBatch) -> Any:
                q, layers = state
                rules = {"scale": head_dim**-0.5, "window": None, "softcap": None}
                outputs = [ATTENTION(q, k, k, pages, batch, None, **rules) for pages in layers]
                return tied(q, [out for out, _ in outputs]), [pages for _, pages in outputs]

            picked = ATTENTION.explain(
                jax.devices()[0].platform, q, k, k, layers[0], batch, None, scale=1.0, window=None, softcap=None
            )
            seen = sum(new * length - new * (new - 1) // 2 for length in lengths)  # keys of all queries
            read = layers[0].layout.page_bytes(num_kv_heads=kv_heads, head_dim=head_dim) * num_pages
            work = Work(read + 2 * q.nbytes, 4 * seen * heads * head_dim)
            run = many_times(step, (q, layers), k, batch, times=sizes.times)
            yield Figure(f"{name}, {cache}", picked, fastest(run, sizes.calls) / (sizes.times * sizes.layers), work)


def batch_of(lengths: Sequence[int], new: int) -> tuple[RaggedBatch, int]:
    """Requests that have these lengths with ``new`` new tokens each, in pages from 1 on; and how many pages."""
    pages = [-(-length // PAGE) for length in lengths]
    starts = 1 + np.cumsum([0, *pages])
    table = np.zeros((len(lengths), max(pages)), np.int32)
    kv_index = []
    for row, length in enumerate(lengths):
        table[row, : pages[row]] = np.arange(starts[row], starts[row + 1])
        position = np.arange(length - new, length)
        kv_index.append(table[row, position // PAGE] * PAGE + position % PAGE)
    batch = RaggedBatch(
        query_start=jnp.arange(len(lengths) + 1, dtype=jnp.int32) * new,
        kv_len=jnp.asarray(lengths, jnp.int32),
        page_table=jnp.asarray(table),
        kv_index=jnp.asarray(np.concatenate(kv_index), jnp.int32),
        decode=new == 1,
    )
    return batch, sum(pages)


def kv_writes(sizes: Sizes) -> Iterator[Figure]:
    """Keys and values of a layer stored alone; attention does the same before it reads."""
    kv_heads, head_dim = 8, 128
    on_card = jax.devices()[0].platform == "gpu"

    def write(pages: KVPages, k: jax.Array, kv_index: jax.Array) -> KVPages:
        if not on_card:
            return write_kv(pages, k, k, kv_index)
        none = jnp.zeros(0, jnp.int32)
        return store_kv(pages, k, k, RaggedBatch(none, none, none, kv_index))

    for cache in CACHES:
        for tokens in sizes.writes:
            make = partial(make_pages, page_size=PAGE, num_kv_heads=kv_heads, head_dim=head_dim, dtype=jnp.dtype(cache))
            layers = [make(num_pages=-(-tokens // PAGE) + 1) for _ in range(sizes.layers)]
            k = jnp.ones((tokens, kv_heads, head_dim), jnp.bfloat16)
            kv_index = PAGE + jnp.arange(tokens, dtype=jnp.int32)
            stored = layers[0].layout.page_bytes(num_kv_heads=kv_heads, head_dim=head_dim) * tokens / PAGE

            def step(layers: list[KVPages], k: jax.Array, kv_index: jax.Array) -> list[KVPages]:
                return [write(pages, k, kv_index) for pages in layers]

            run = many_times(step, layers, k, kv_index, times=sizes.times)
            by, seconds = "CUDA kernel" if on_card else "XLA", fastest(run, sizes.calls) / (sizes.times * sizes.layers)
            yield Figure(f"KV of {tokens} tokens, {cache}", by, seconds, Work(2 * k.nbytes + stored, 0))


def expert_products(sizes: Sizes) -> Iterator[Figure]:
    """A layer's experts, plain and quantized; each token has others."""
    platform, rng = jax.devices()[0].platform, np.random.default_rng(0)
    count, choices, hidden, inner = sizes.experts

    def stacks(name: str) -> ExpertWeights:
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        if name == "bf16":
            return ExpertWeights(*(Projection(plain(rng, count, *shape)) for shape in shapes))
        return ExpertWeights(
            *(Projection(quantized(FORMATS[name](size_in), count, size_out)) for size_out, size_in in shapes)
        )

    for name in ("bf16", *FORMATS):
        layers = [stacks(name) for _ in range(max(1, sizes.layers // 4))]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(layers[0]))
        for rows in sizes.expert_rows:
            x = plain(rng, rows, hidden)
            chosen = jnp.asarray(np.stack([rng.permutation(count)[:choices] for _ in range(rows)]), jnp.int32)
            shares = jnp.full((rows, choices), 1 / choices, jnp.float32)

            def call(x: jax.Array, weights: ExpertWeights, chosen: jax.Array, shares: jax.Array) -> jax.Array:
                return EXPERTS(x, chosen, shares, weights, activation="silu")

            run = with_each(call, x, layers, chosen, shares, times=sizes.times)
            used = len(np.unique(np.asarray(chosen)))
            yield Figure(
                f"experts, {rows} rows: {used} of {count} in use, {name}",
                EXPERTS.explain(platform, x, chosen, shares, layers[0], activation="silu"),
                fastest(run, sizes.calls) / (sizes.times * len(layers)),
                Work(size * used / count + 4 * rows * hidden, 6 * rows * choices * hidden * inner),
            )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--shapes", default="llama-8b,qwen3-8b,qwen3-30b-a3b", help=f"models, of {', '.join(MODELS)}")
    parser.add_argument(
        "--formats",
        default="bfloat16,q8_0,q4_k",
        help="bfloat16, what --quantization takes, or gguf:TYPE for a file whose matrices are of that type",
    )
    parser.add_argument("--graphs", default="auto", help="auto,off measures models with CUDA graphs and without")
    parser.add_argument("--offload", type=int, default=0, help="experts of each layer in the host's memory")
    parser.add_argument("--work-dir", default=str(Path(tempfile.gettempdir()) / "llmjax-gpu"), help="for weights")
    parser.add_argument("--small", action="store_true", help="sizes for a try-out")
    parser.add_argument("--compare", metavar="PYTHON", help="an interpreter that has torch and transformers")
    parser.add_argument(
        "--output",
        help="file for all figures as JSON (default: on a card, but with --small, "
        "benchmarks/results/CARD-DATE-COMMIT.json, or the next free name)",
    )
    options = parser.parse_args(argv)
    parts, shapes = options.only.split(","), options.shapes.split(",")
    for given, known in ((parts, PARTS), (shapes, MODELS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    stored = [form for form in options.formats.split(",") if Setup(shapes[0], form).stored]
    if stored and (experts := [name for name in shapes if isinstance(MODELS[name], MoEShape)]):
        parser.error(f"{stored[0]}: no GGUF file is written of {experts[0]}, which has experts")
    if not options.small and nvidia_cards() is None:
        parser.error("needs an NVIDIA GPU, and nvidia-smi does not run; --small is a try-out")
    sizes = SMALL if options.small else Sizes()
    peers = [
        figure
        for name in shapes
        if options.compare and not isinstance(MODELS[name], MoEShape)
        for figure in of_transformers(options.compare, name, sizes)
    ]
    config = EngineConfig(device="auto" if options.small else "cuda")
    device = select_platform(config).device  # with the pool of memory that the engines below ask for
    limits = measure_limits(sizes)
    about = {
        "card": device.device_kind,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("llmjax", "jax", "jaxlib")},
        "limits": asdict(limits),
    }
    console = Console(width=160)
    console.print(
        f"{device.device_kind}: copies {limits.bytes_per_second / 1e9:,.0f} GB/s, bf16 products "
        f"{limits.flops_per_second / 1e12:.4g} TFLOP/s; {about['versions']}; {about['date']}, commit {about['commit']}",
        highlight=False,
    )
    output = Path(options.output) if options.output else None
    if output is None and device.platform != "cpu" and not options.small:
        output = free_path(RESULTS, f"{device.device_kind}-{about['date']}-{about['commit']}")
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
    figures: list[Figure] = []

    def show(found: Iterator[Figure]) -> None:
        """Prints and writes each as soon as it is there."""
        print(head(), flush=True)
        for figure in found:
            print(row_of(figure, limits), flush=True)
            figures.append(figure)
            if output:
                output.write_text(json.dumps({**about, "figures": [asdict(f) for f in figures]}, indent=2))

    if peers:
        show(iter(peers))
    if "kernels" in parts:
        show(products(sizes))
        show(attentions(replace(sizes, layers=min(sizes.layers, 8))))
        show(kv_writes(sizes))
        show(expert_products(sizes))
    if "models" in parts:
        # On a card, sizes of steps are those that users get.
        small = {"kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 2, "max_num_batched_tokens": 64}
        extra: dict[str, Any] = small if options.small else {}
        for shape, form, graphs in product(shapes, options.formats.split(","), options.graphs.split(",")):
            setup = Setup(shape, form, graphs, options.offload if isinstance(MODELS[shape], MoEShape) else 0)
            show(model_figures(Path(options.work_dir), setup, sizes, extra))
    if output:
        console.print(f"{output}", highlight=False)
    return 0


def free_path(folder: Path, name: str) -> Path:
    """A JSON file of that name that is not there yet, numbered if need be."""
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    names = chain([f"{name}.json"], (f"{name}-{number}.json" for number in count(2)))
    return next(path for path in (folder / each for each in names) if not path.exists())


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"gpu: error: {error}")
