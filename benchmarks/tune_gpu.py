"""Measures how kernels should divide their work on the GPU at hand, and writes the table that they read when traced.

    python -m benchmarks.tune_gpu [--only product,decode] [--missing] [--output FILE]

From what arithmetic gives, one field of a division is changed at a time as long as that makes the kernel faster.
Inputs are random and, for products, more than a card's cache holds. The table goes to ``kernels/cuda/tuned/``, where
kernels find it by the card's name; it is written after each kernel, and entries that are not measured again stay.
``--small`` tries it out on any machine with interpreted kernels, whose times say nothing: it needs ``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks.gpu import FORMATS, PAGE, quantized
from benchmarks.gpu_figures import fastest, many_times, with_each
from llmjax.config import EngineConfig
from llmjax.engine.device.batch import Bucket, make_buckets
from llmjax.kernels.attention import KVPages, RaggedBatch, make_pages
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.cuda import mosaic_decode, mosaic_kv_write, mosaic_prefill
from llmjax.kernels.cuda.decode import decode
from llmjax.kernels.cuda.experts import experts, plans_of, rows_of
from llmjax.kernels.cuda.flash import QueryRules
from llmjax.kernels.cuda.fragments import FragmentPlan
from llmjax.kernels.cuda.kv_write import Storing, write_kv
from llmjax.kernels.cuda.lowering import has_triton
from llmjax.kernels.cuda.pages import PageReader
from llmjax.kernels.cuda.prefill import Tiles, prefill
from llmjax.kernels.cuda.quantized_linear import key_of, plan_of, quantized_linear, refuses
from llmjax.kernels.cuda.split import Split
from llmjax.kernels.cuda.tuned import Key, Table, TableError, path_for
from llmjax.kernels.qtensor import CUDA_TILE
from llmjax.step_sizes import MOST

Choice = Mapping[str, int]
Call = Callable[[], Any]
KINDS = ("product", "experts", "decode", "prefill", "store")
WORTH = 0.97  # of the time before: less is noise
BEYOND_CACHE = 1 << 28  # bytes of KV pages that no card's cache holds
CANNOT = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError)  # of XLA and of Pallas' lowering


def default_buckets() -> list[Bucket]:
    """The buckets of an engine with default settings on a large card."""
    config = EngineConfig().with_sizes(MOST)
    return make_buckets(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens)


DECODE = tuple(bucket.rows for bucket in default_buckets() if bucket.decode)
MIXED = tuple(bucket.tokens for bucket in default_buckets() if not bucket.decode)
TOKENS = tuple(sorted({*DECODE, *MIXED}))


@dataclass(frozen=True)
class Problem:
    """A kernel with inputs.

    Args:
        start: what arithmetic gives, for each field.
        fields: what may be tried.
        run: makes a call, given other values of some fields, which computes all layers as often as is said.
        layers: how many layers a call computes, each with inputs of its own.
        lowerings: what may be tried besides while the field ``mosaic`` is 0, and while it is 1.
    """

    key: Key
    start: Choice
    fields: Mapping[str, tuple[int, ...]]
    run: Callable[[Choice, int], Call]
    layers: int = 1
    lowerings: tuple[Mapping[str, tuple[int, ...]], ...] = ({}, {})

    @property
    def names(self) -> list[str]:
        """Names of all fields."""
        return list(dict.fromkeys([*self.fields, *self.lowerings[0], *self.lowerings[1]]))

    def values(self, field: str, choice: Choice) -> tuple[int, ...]:
        """Values of a field to try; none where the chosen lowering does not have the field."""
        choices = self.lowerings[{**self.start, **choice}.get("mosaic", 0)]
        return choices.get(field, self.fields.get(field, ()))

    def shortened(self, most: int) -> Problem:
        """The same, with at most ``most`` values of each field."""
        fields, *lowerings = (
            {field: values[:most] for field, values in each.items()} for each in (self.fields, *self.lowerings)
        )
        return replace(self, fields=fields, lowerings=tuple(lowerings))


@dataclass(frozen=True)
class Found:
    """The best choice; one that changes nothing is empty."""

    choice: Choice
    seconds: float
    seconds_at_start: float


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    matrices: tuple[tuple[int, int], ...] = ((4096, 4096), (14336, 4096), (4096, 14336))
    rows: tuple[int, ...] = TOKENS
    layers: int = 8  # at most
    experts: tuple[tuple[int, int, int, int], ...] = ((128, 8, 2048, 768), (8, 2, 4096, 14336))  # E, K, D, F
    tokens: tuple[int, ...] = TOKENS
    heads: tuple[tuple[int, int, int, int | None], ...] = ((32, 8, 128, None), (128, 1, 576, 512))
    caches: tuple[str, ...] = ("bfloat16", "int8", "float8_e4m3fn")
    decodes: tuple[int, ...] = (*DECODE, 64, 256)  # requests
    context: int = 4096  # of each
    prefills: tuple[int, ...] = (*MIXED, 4096)
    formats: tuple[str, ...] = tuple(FORMATS)
    calls: int = 5
    times: int = 20  # that each computes all layers
    values: int = 8  # tried of each field at most


SMALL = Sizes(
    matrices=((64, 64),),
    rows=(1, 3),
    layers=1,
    experts=((2, 1, 32, 32),),
    tokens=(1,),
    heads=((2, 1, 16, None),),
    caches=("int8",),
    decodes=(1,),
    context=32,
    prefills=(32,),
    formats=("q4_k",),
    calls=1,
    times=1,
    values=1,
)


def best(problem: Problem, seconds: Callable[[Sequence[Choice]], list[float]]) -> Found:
    """Changes one field after the other until none makes it faster.

    Args:
        seconds: times a layer with each of some choices of fields; infinite where the card cannot run it.
    """
    choice: dict[str, int] = {}
    (at_start,) = seconds([choice])
    fastest_yet = at_start
    again = True
    while again:
        again = False
        for field in problem.names:
            now = choice.get(field, problem.start[field])
            tried = [{**choice, field: value} for value in problem.values(field, choice) if value != now]
            if not tried:
                continue
            taken = seconds(tried)
            if min(taken) < WORTH * fastest_yet:
                fastest_yet = min(taken)
                choice, again = tried[taken.index(fastest_yet)], True
    return Found({k: v for k, v in choice.items() if v != problem.start[k]}, fastest_yet, at_start)


def timed(problem: Problem, sizes: Sizes, console: Console) -> Callable[[Sequence[Choice]], list[float]]:
    """Measures choices, each once: compiled side by side, and run one after the other."""
    measured: dict[tuple[tuple[str, int], ...], float] = {}

    def name_of(choice: Choice) -> tuple[tuple[str, int], ...]:
        return tuple(sorted({**problem.start, **choice}.items()))

    def ready(choice: Choice) -> Call | None:
        try:
            call = problem.run(choice, sizes.times)
            jax.block_until_ready(call())
            return call
        except CANNOT as error:  # more shared memory or registers than the card has, or a form that does not lower
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            console.print(f"  {dict(choice)} cannot run: {reason}", highlight=False)
            return None

    def seconds(choices: Sequence[Choice]) -> list[float]:
        new = {name_of(choice): choice for choice in choices if name_of(choice) not in measured}
        with ThreadPoolExecutor() as threads:
            calls = list(threads.map(ready, new.values()))
        for name, call in zip(new, calls, strict=True):
            taken = fastest(call, sizes.calls) if call else float("inf")
            measured[name] = taken / (problem.layers * sizes.times)
        return [measured[name_of(choice)] for choice in choices]

    return seconds


def products(sizes: Sizes, interpret: bool) -> Iterator[Problem]:
    for size_out, size_in in sizes.matrices:
        for name in sizes.formats:
            layers = [quantized(FORMATS[name](size_in), size_out, tile=CUDA_TILE) for _ in range(sizes.layers)]
            for rows in sizes.rows:
                x = jnp.ones((rows, size_in), jnp.bfloat16)
                if refuses(x, layers[0]):  # what is dequantized once
                    continue
                start = plan_of(rows, layers[0])

                def run(choice: Choice, times: int, x: Any = x, layers: Any = layers, start: Any = start) -> Call:
                    plan = start.changed(choice, layers[0].format.num_chunks)
                    call = partial(quantized_linear, plan=plan, interpret=interpret)
                    return with_each(call, x, layers, times=times)

                fields: dict[str, tuple[int, ...]] = {"splits": (1, 2, 4, 8, 16)}
                if isinstance(start, FragmentPlan):
                    fields |= {"tiles": (1, 2, 4), "rows": (8, 16, 32, 64)}
                else:
                    fields |= {
                        "chunks": (16, 32, 64, 128),
                        "warps": (1, 2, 4, 8),
                        "stages": (1, 2, 3, 4),
                        "outputs": (32, 64, 128),
                    }
                    if start.rows > 2:
                        fields["rows"] = (16, 32, 64, 128)
                yield Problem(key_of(rows, layers[0]), asdict(start), fields, run, sizes.layers)


def mixtures(sizes: Sizes, interpret: bool) -> Iterator[Problem]:
    for count, top, width, inner in sizes.experts:
        for name in ("bfloat16", *sizes.formats):

            def stack(size_out: int, size_in: int, name: str = name, count: int = count) -> Projection:
                if name in FORMATS:
                    return Projection(quantized(FORMATS[name](size_in), count, size_out, tile=CUDA_TILE))
                return Projection(jnp.full((count, size_out, size_in), 0.01, jnp.bfloat16))

            weights = ExpertWeights(gate=stack(inner, width), up=stack(inner, width), down=stack(width, inner))
            for tokens in sizes.tokens:
                rng = np.random.default_rng(0)
                # Each layer has experts of its own to fetch, though they are of one stack.
                shape = (sizes.layers, tokens, top)
                picks = [rng.permutation(count)[:top] for _ in range(sizes.layers * tokens)]
                chosen = jnp.asarray(picks, jnp.int32).reshape(shape)
                x, shares = jnp.ones((tokens, width), jnp.bfloat16), jnp.full((tokens, top), 1 / top, jnp.float32)
                rows = rows_of(tokens, tokens * top, weights)
                for key, start in plans_of(rows, tokens * top, weights).items():
                    inputs = (x, chosen, shares, weights)

                    def run(
                        choice: Choice, times: int, key: Key = key, start: Any = start, inputs: Any = inputs
                    ) -> Call:
                        choices = {key.kernel: {**asdict(start), **choice}}
                        call = partial(experts, activation="silu", choices=choices, interpret=interpret)
                        return with_each(call, *inputs, times=times)

                    records = name in FORMATS
                    fields: dict[str, tuple[int, ...]] = {"splits": (1, 2, 4, 8)}
                    if isinstance(start, FragmentPlan):
                        fields |= {"tiles": (1, 2, 4)}
                    else:
                        fields |= {
                            "chunks": (16, 32, 64) if records else (1, 2, 4, 8, 16, 32),
                            "outputs": (32, 64, 128) if records else (8, 16, 32, 64, 128),
                            "warps": (1, 2, 4, 8),
                            "stages": (1, 2, 3, 4),
                        }
                    yield Problem(key, asdict(start), fields, run, sizes.layers)


def caches(sizes: Sizes, requests: int, length: int) -> Iterator[tuple[jax.Array, list[KVPages], jax.Array]]:
    """Queries of one token a request, pages of layers and page tables, for every kind of head and of pages."""
    per_row = -(-length // PAGE)
    table = 1 + jnp.arange(requests * per_row, dtype=jnp.int32).reshape(requests, per_row)
    for heads, kv_heads, head_dim, value_dim in sizes.heads:
        for cache in sizes.caches:
            make = partial(
                make_pages,
                num_pages=table.size + 1,
                page_size=PAGE,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=jnp.dtype(cache),
                value_dim=value_dim,
            )
            layers = [make()]
            while len(layers) < sizes.layers and len(layers) * layers[0].data.nbytes < BEYOND_CACHE:
                layers.append(make())
            yield jnp.ones((requests, heads, head_dim), jnp.bfloat16), layers, table


def decodes(sizes: Sizes, interpret: bool) -> Iterator[Problem]:
    rules = QueryRules(scale=0.1, window=None, softcap=None)
    for requests in sizes.decodes:
        for q, layers, table in caches(sizes, requests, sizes.context):
            pages = layers[0]
            reader = PageReader.of(pages, q)
            # From short ones to the longest, or uneven rows would be left to chance.
            kv_len = jnp.asarray(-(-sizes.context * np.arange(1, requests + 1) // requests), jnp.int32)
            start = Split.of(q.shape[1] // pages.data.shape[2], pages, reader)
            batch = RaggedBatch(
                jnp.arange(requests + 1, dtype=jnp.int32), kv_len, table, jnp.zeros(requests, jnp.int32), decode=True
            )

            def run(choice: Choice, times: int, start: Split = start, inputs: Any = (q, layers, batch)) -> Call:
                call = partial(decode, sinks=None, rules=rules, split=replace(start, **choice), interpret=interpret)
                return with_each(call, *inputs, times=times)

            fields: dict[str, tuple[int, ...]] = {"shares": (8, 16, 32, 64, 128, 256), "keys": (16, 32, 64, 128)}
            by_triton = {"warps": (1, 2, 4, 8), "stages": (1, 2, 3, 4), "heads": (16, 32, 64)}
            if has_triton() and not mosaic_decode.refuses(q, pages):
                fields = {"mosaic": (0, 1), **fields}
            lowerings = (by_triton, {"heads": (8, 16)})
            yield Problem(Split.key(q, pages, reader), asdict(start), fields, run, len(layers), lowerings)


def prefills(sizes: Sizes, interpret: bool) -> Iterator[Problem]:
    rules = QueryRules(scale=0.1, window=None, softcap=None)
    for length in sizes.prefills:
        for one, layers, table in caches(sizes, 1, length):
            q, pages = jnp.broadcast_to(one, (length, *one.shape[1:])), layers[0]
            reader, group = PageReader.of(pages, q), q.shape[1] // pages.data.shape[2]
            start, count = Tiles.of(length, group, reader), jnp.full(1, length, jnp.int32)
            batch = RaggedBatch(jnp.asarray([0, length], jnp.int32), count, table, jnp.zeros(length, jnp.int32))

            def run(choice: Choice, times: int, start: Tiles = start, inputs: Any = (q, layers, batch, count)) -> Call:
                call = partial(prefill, sinks=None, rules=rules, tiles=replace(start, **choice), interpret=interpret)
                return with_each(call, *inputs, times=times)

            by_triton: dict[str, tuple[int, ...]] = {"keys": (16, 32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3, 4)}
            # A tile has 16 queries at least, for tensor cores.
            by_triton["tokens"] = tuple(n for n in (4, 8, 16, 32, 64, 128) if 16 <= n * start.heads <= 256)
            hopper = getattr(jax.devices()[0], "compute_capability", "") == "9.0"
            takes = hopper and not mosaic_prefill.refuses(q, pages, None)
            fields, lowerings = ({"mosaic": (0, 1)}, (by_triton, {})) if takes else (by_triton, ({}, {}))
            yield Problem(Tiles.key(q, pages, reader), asdict(start), fields, run, len(layers), lowerings)


def stores(sizes: Sizes, interpret: bool) -> Iterator[Problem]:
    none = jnp.zeros(0, jnp.int32)
    for tokens in sizes.tokens:
        for _, layers, _ in caches(sizes, 1, tokens):
            pages = layers[0]
            k = jnp.ones((tokens, pages.data.shape[2], pages.head_dim), jnp.bfloat16)
            v = None if pages.layout.value_dim else k
            batch = RaggedBatch(none, none, none, PAGE + jnp.arange(tokens, dtype=jnp.int32))
            start = Storing.of(tokens)

            def run(
                choice: Choice, times: int, start: Any = start, inputs: Any = (k, v, batch), layers: Any = layers
            ) -> Call:
                write = partial(write_kv, storing=replace(start, **choice), interpret=interpret)

                def step(layers: list[KVPages], *inputs: Any) -> list[KVPages]:
                    return [write(pages, *inputs) for pages in layers]

                return many_times(step, jax.tree.map(jnp.copy, layers), *inputs, times=times)

            takes = has_triton() and not mosaic_kv_write.refuses(k, pages)
            fields = {"mosaic": (0, 1)} if takes else {}
            lowerings = ({"tokens": (1, 2, 4, 8, 16, 32)}, {})
            yield Problem(Storing.key(k, pages), asdict(start), fields, run, len(layers), lowerings)


PROBLEMS = {"product": products, "experts": mixtures, "decode": decodes, "prefill": prefills, "store": stores}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(KINDS), help=f"kernels, of {', '.join(KINDS)}")
    parser.add_argument("--missing", action="store_true", help="leave out what the table has")
    parser.add_argument("--small", action="store_true", help="a try-out on any machine; times say nothing")
    parser.add_argument("--output", help="file of the table; default: where kernels look for it")
    options = parser.parse_args(argv)
    kinds = options.only.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    device = jax.devices()[0]
    if options.small and not options.output:
        parser.error("--small needs --output: what it measures is not a table for a card")
    if not options.small and device.platform != "gpu":
        parser.error(f"needs an NVIDIA GPU, not {device.platform}; --small is a try-out")
    sizes, console = SMALL if options.small else Sizes(), Console(width=160)
    path = Path(options.output) if options.output else path_for(device.device_kind)
    try:
        entries = entries_of(path, device.device_kind)
    except TableError as error:
        parser.error(str(error))
    for kind in kinds:
        for problem in PROBLEMS[kind](sizes, options.small):
            if options.missing and problem.key in entries:
                continue
            found = tuned_problem(problem, sizes, console)
            if found is not None:
                entries[problem.key] = found
                write(path, device.device_kind, list(entries.values()))
    console.print(f"{path}: {len(entries)} entries")
    return 0


def tuned_problem(problem: Problem, sizes: Sizes, console: Console) -> dict[str, Any] | None:
    """The line of the table for a problem; None: the card runs it in no way."""
    choice = best(problem.shortened(sizes.values), timed(problem, sizes, console))
    text = f"{choice.seconds_at_start * 1e6:,.1f} µs, {choice.seconds * 1e6:,.1f} with {dict(choice.choice)}"
    console.print(f"{problem.key.kernel}, {problem.key.form}, {problem.key.sizes}: {text}", highlight=False)
    return entry(problem.key, choice) if choice.seconds < float("inf") else None


def entries_of(path: Path, card: str) -> dict[Key, dict[str, Any]]:
    """The entries of a table that is there already.

    Raises:
        TableError: it is not a table, or is another card's.
    """
    if not path.exists():
        return {}
    table = Table.read(path)
    if table.card != card:
        raise TableError(f"{path}: a table for {table.card}, and this is {card}")
    return dict(zip(table.choices, json.loads(path.read_text())["entries"], strict=True))


def write(path: Path, card: str, entries: list[dict[str, Any]]) -> None:
    """Writes a table, whole or not at all."""
    about = {"card": card, "date": datetime.now(UTC).date().isoformat()}
    versions = {name: version(name) for name in ("llmjax", "jax", "jaxlib")}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({**about, "versions": versions, "entries": entries}, indent=1) + "\n")
    os.replace(new, path)


def entry(key: Key, found: Found) -> dict[str, Any]:
    """A line of the table."""
    by_arithmetic = round(found.seconds_at_start * 1e6, 2) if found.seconds_at_start < float("inf") else None
    return {
        "kernel": key.kernel,
        "format": key.form,
        "sizes": key.sizes,
        "choice": dict(found.choice),
        "microseconds": round(found.seconds * 1e6, 2),
        "microseconds_by_arithmetic": by_arithmetic,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
