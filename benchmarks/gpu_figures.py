"""What `benchmarks.gpu` measures with: sizes, a card's limits, figures beside their bounds, and the table of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.table import Table


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


def measure_limits(sizes: Sizes) -> Limits:
    x = jnp.zeros(sizes.copy_mib << 18, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    a = jnp.ones((sizes.matmul, sizes.matmul), jnp.bfloat16)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.bfloat16))
    return Limits(
        bytes_per_second=2 * x.nbytes / fastest(lambda: copy(x), sizes.calls),
        flops_per_second=2 * sizes.matmul**3 / fastest(lambda: product(a), sizes.calls),
    )


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
