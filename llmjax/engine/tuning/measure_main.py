"""Measures methods of products: ``python -m llmjax.engine.tuning.measure_main``.

The process has one core, and what counts is the time that it computes, not the time that passes: so it may run while
others load and compile. Standard input says what to measure, standard output is what was measured.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.tuning.measure import Product
from llmjax.kernels.choices import BY_XLA, NATIVE, ROWS, TABLE, Timing
from llmjax.kernels.cpu import linear as cpu_linear
from llmjax.kernels.cpu.library import library
from llmjax.kernels.dense_linear import CPU_MIN_ROWS, linear_by_padding, linear_by_xla
from llmjax.kernels.qtensor import CPU_TILE, QTensor

WORK = 2e8  # operations of one run, about: two milliseconds of a core
BYTES = 8e6  # of a matrix, at most
LEAST_OUTPUTS = 256
SECONDS = 0.6  # of runs, beside importing and compiling
LEAST_TURNS = 3
REFUSED = "the method does not take"  # what the library says of codes or instruction sets


def measured_here(products: Iterable[Product], *, seconds: float = SECONDS) -> tuple[Timing, ...]:
    """Measures products in this process: the least time of several runs.

    Args:
        seconds: how long to repeat the runs, after the first three of each.
    """
    least: dict[tuple[Product, int, int, str], float] = {}
    runs = [(product, rows, *_runs(product, rows)) for product in products for rows in ROWS]
    began, turn = time.process_time(), 0
    while turn < LEAST_TURNS or time.process_time() - began < seconds:
        for product, rows, outputs, methods in runs:
            # In turns, each time from another one on: the first finds the matrix further away than the others.
            names = list(methods)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                start = time.process_time()
                jax.block_until_ready(methods[name]())
                key = (product, rows, outputs, name)
                least[key] = min(least.get(key, float("inf")), time.process_time() - start)
        turn += 1
    return tuple(
        Timing(product.kind, method, (outputs, product.shape[1]), rows, spent)
        for (product, rows, outputs, method), spent in least.items()
    )


def _runs(product: Product, rows: int) -> tuple[int, dict[str, Callable[[], object]]]:
    """Outputs, and a call by each method that there is for such codes and this instruction set."""
    weight = random_weight(product, _outputs(product, rows))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, product.shape[1])), jnp.float32)
    runs = {}
    for method in product.methods:
        run = _run(method, x, weight)
        try:
            jax.block_until_ready(run())
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if REFUSED not in str(error):
                raise
        else:
            runs[method] = run
    return weight.shape[0], runs


def random_weight(product: Product, size_out: int, *, seed: int = 0) -> jax.Array | QTensor:
    """A matrix [size_out, in]; a quantized one has random codes, and scales of about 1/1000."""
    rng, form = np.random.default_rng(seed), product.format
    if form is None:
        values = rng.standard_normal((LEAST_OUTPUTS, product.shape[1]), np.float32).astype(jnp.dtype(product.dtype))
        return jnp.asarray(np.resize(values, (size_out, product.shape[1])))
    words = rng.integers(0, 1 << 32, (-(-size_out // CPU_TILE), form.num_words, CPU_TILE), dtype=np.uint32)
    if form.codes.kind in ("e4m3", "e5m2"):
        words &= 0x3F3F3F3F  # no NaN
    plain = {"f32": 0x3A800000, "f16": 0x14001400, "bf16": 0x3A803A80, "e8m0": 0x75757575}
    for entry in form.fields.values():
        words[:, entry.start : entry.start + entry.num_words] = plain.get(entry.number, 0x11111111)
    return QTensor(jnp.asarray(words), None, form, size_out, jnp.dtype(product.dtype), product.activations)


def _outputs(product: Product, rows: int) -> int:
    """Outputs that take as long as is measured well, and no longer."""
    size_in = product.shape[1]
    bytes_of_row = (
        size_in * jnp.dtype(product.dtype).itemsize if product.format is None else 4 * product.format.num_words
    )
    wanted = min(WORK / (2 * rows * size_in), BYTES / bytes_of_row)
    return min(product.shape[0], max(LEAST_OUTPUTS, int(wanted) // CPU_TILE * CPU_TILE))


def _run(method: str, x: jax.Array, weight: jax.Array | QTensor) -> Callable[[], object]:
    """A call of one product by a method."""

    def product(x: jax.Array, weight: jax.Array | QTensor) -> jax.Array:
        if method == BY_XLA:
            assert isinstance(weight, jax.Array)
            few = len(x) < CPU_MIN_ROWS and weight.dtype.itemsize == 2
            return linear_by_padding(x, weight) if few else linear_by_xla(x, weight)
        return cpu_linear.linear(x, weight, method=None if method in (NATIVE, TABLE) else method)

    program = jax.jit(product).lower(x, weight).compile()
    return lambda: program(x, weight)


def main() -> None:
    if hasattr(os, "sched_setaffinity"):  # before JAX starts threads
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    products: list[Product] = pickle.load(sys.stdin.buffer)
    if library() is None:
        sys.exit("there are no C++ kernels")
    sys.stdout.buffer.write(pickle.dumps(measured_here(products)))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
