"""What `benchmarks.gpu` measures with: sizes, a card's limits, figures beside their bounds, and the table of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.engine.programs.graphs import GRAPHS


@dataclass(frozen=True)
class Sizes:
    """What is measured, and how often."""

    copy_mib: int = 1024
    matmul: int = 8192
    matrices: tuple[tuple[int, int], ...] = ((4096, 4096), (14336, 4096), (4096, 14336))
    rows: tuple[int, ...] = (1, 2, 8, 16, 64, 256, 2048)
    layers: int = 16  # distinct inputs of a kernel: more than the card's cache holds
    calls: int = 5  # on their way at once, so that the host's time does not count
    times: int = 20  # that a call of kernels computes all layers: the host takes longer to start some than they need
    attention: tuple[tuple[int, int], ...] = ((1, 512), (1, 4096), (16, 4096), (64, 2048))  # requests, context
    uneven: tuple[tuple[int, int, int], ...] = ((63, 500, 32768),)  # requests, context of each; that of one more
    experts: tuple[int, int, int, int] = (128, 8, 2048, 768)  # experts, of a token, hidden and inner size
    expert_rows: tuple[int, ...] = (1, 8, 64, 512)
    writes: tuple[int, ...] = (1, 64, 2048)  # tokens
    prefill: tuple[int, ...] = (512, 4096)
    context: tuple[int, ...] = (512, 4096)
    streams: tuple[int, ...] = (16, 64, 256)


SMALL = Sizes(
    copy_mib=64,
    matmul=512,
    matrices=((256, 256),),
    rows=(1, 8),
    layers=2,
    calls=2,
    times=2,
    attention=((2, 64),),
    uneven=((3, 20, 100),),
    experts=(8, 2, 64, 32),
    expert_rows=(1, 8),
    writes=(8,),
    prefill=(64,),
    context=(48,),
    streams=(2,),
)


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


def many_times(step: Callable[..., Any], state: Any, *others: Any, times: int) -> Callable[[], Any]:
    """A call of one program in which each step begins with what the one before it gave, on a GPU as one graph.

    Args:
        step: takes ``state`` and the others, gives a new state. Where it has nothing to give, it says so by `tied`.
        state: arrays; they are given away.
    """
    options = dict(GRAPHS) if jax.devices()[0].platform == "gpu" else {}

    def program(state: Any, others: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, state: step(state, *others), state)

    compiled = jax.jit(program, donate_argnums=0, compiler_options=options)
    last = [state]

    def call() -> Any:
        last[0] = compiled(last[0], others)
        return last[0]

    return call


def tied(x: jax.Array, found: Any) -> jax.Array:
    """x, finite as it is, once finite arrays have been computed."""
    first = sum(leaf.ravel()[0].astype(jnp.float32) for leaf in jax.tree.leaves(found))
    return x + (0 * first).astype(x.dtype)


def with_each(
    call: Callable[..., Any], x: jax.Array, each: Iterable[Any], *others: Any, times: int
) -> Callable[[], Any]:
    """``call(x, one, *others)`` for all that there are of something, as layers' weights, so often.

    Args:
        x: f[T, D], or queries; a copy is given away.
        each: a pytree that programs can iterate, a list or an array.
    """

    def step(x: jax.Array, each: Iterable[Any], *others: Any) -> jax.Array:
        return tied(x, [call(x, one, *others) for one in each])

    return many_times(step, jnp.copy(x), each, *others, times=times)


def measure_limits(sizes: Sizes) -> Limits:
    """Measures with random numbers: with zeros or ones a card takes less power and so computes faster."""
    x = jax.random.normal(jax.random.key(0), (sizes.copy_mib << 18,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    a = jax.random.normal(jax.random.key(1), (sizes.matmul, sizes.matmul), jnp.bfloat16)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.bfloat16))
    return Limits(
        bytes_per_second=2 * x.nbytes / fastest(lambda: copy(x), sizes.calls),
        flops_per_second=2 * sizes.matmul**3 / fastest(lambda: product(a), sizes.calls),
    )


COLUMNS = (("", -64), ("by", -24), ("ms", 9), ("tok/s", 9), ("GB/s", 7), ("TFLOP/s", 8), ("of the bound", 12))


def row_of(figure: Figure, limits: Limits) -> str:
    """A line of the table."""
    return _row(
        figure.name,
        figure.implementation,
        f"{figure.seconds * 1e3:.4g}",
        f"{figure.tokens / figure.seconds:,.0f}" if figure.tokens else "",
        f"{figure.work.bytes / figure.seconds / 1e9:,.0f}",
        f"{figure.work.flops / figure.seconds / 1e12:.4g}",
        f"{limits.seconds(figure.work) / figure.seconds:.0%}",
    )


def head() -> str:
    """The table's first two lines, in Markdown."""
    rule = ("-" * -width if width < 0 else "-" * (width - 1) + ":" for _, width in COLUMNS)
    return f"{_row(*(title for title, _ in COLUMNS))}\n{_row(*rule)}"


def _row(*cells: str) -> str:
    """A row whose cells have at least their column's width; a negative width is that of a cell aligned left."""
    widths = (width for _, width in COLUMNS)
    return f"| {' | '.join(c.ljust(-w) if w < 0 else c.rjust(w) for c, w in zip(cells, widths, strict=True))} |"
