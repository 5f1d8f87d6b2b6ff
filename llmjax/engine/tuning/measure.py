"""Has methods of products measured on this machine, by a process that does nothing else."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmjax.kernels.choices import Timing
from llmjax.kernels.cpu.library import ISA_VARIABLE, library
from llmjax.kernels.row_format import RowFormat
from llmjax.system import python_path

POOL = "NPROC"  # threads of XLA's pool
LIMIT = 120.0  # seconds that pass, after which measuring is given up


class NotMeasured(Exception):
    """The error that methods could not be measured."""


@dataclass(frozen=True)
class Product:
    """What is measured: products with matrices of one kind.

    Attributes:
        kind: see `choices.kind_of`.
        methods: see `matrices.candidates`.
        shape: [out, in] of the model's matrix; fewer outputs are measured where that is enough.
        format: how rows of a quantized matrix are stored; None: the matrix is plain.
        dtype: type of a plain matrix, or that which quantized ones are dequantized to.
        activations: see `QTensor`.
    """

    kind: str
    methods: tuple[str, ...]
    shape: tuple[int, int]
    format: RowFormat | None
    dtype: str
    activations: str


def measure(products: Sequence[Product]) -> tuple[Timing, ...]:
    """Measures products in a process of its own, which takes about a second and a half.

    Raises:
        NotMeasured: the process fails, or takes too long.
    """
    command = [sys.executable, "-m", "llmjax.engine.tuning.measure_main"]
    fresh = [replace(one, format=one.format and replace(one.format)) for one in products]  # without what was derived
    environment = {**os.environ, "PYTHONPATH": python_path(), POOL: "1", "JAX_PLATFORMS": "cpu"}
    if (native := library()) is not None and native.forced is not None:
        environment[ISA_VARIABLE] = native.forced
    try:
        done = subprocess.run(
            command, input=pickle.dumps(fresh), env=environment, capture_output=True, timeout=LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(str(error)) from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise NotMeasured(lines[-1] if lines else f"the process ended with status {done.returncode}")
    timings: tuple[Timing, ...] = pickle.loads(done.stdout)
    return timings
