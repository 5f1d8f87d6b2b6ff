"""What kernels are compared with, and the table of kernels."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import kernels
from benchmarks.limits import KINDS, limits
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.matrices import METHODS

# Products of an instruction, as a multiple of those of f32: in vectors, and by what has instructions for matrices.
VECTORS = {"f32": 1, "bf16": 2, "int16": 2, "int8": 4}
PRODUCTS = {("amx", "int8"): 32, ("amx", "bf16"): 16, ("i8mm", "int8"): 8}
REPEAT = 100  # short pieces of work, of which some have the machine for themselves

native = library()
pytestmark = pytest.mark.skipif(native is None, reason="the C++ library is not built")


@pytest.mark.slow
@pytest.mark.alone
def test_numpy_does_not_exceed_what_the_loops_reach_and_comes_close_to_it() -> None:
    """In a matrix product and a sum numpy's libraries reach much of what a machine can do: if they make more, a loop is
    slow, and if they make next to nothing of it, its work is counted wrongly."""
    assert native is not None
    best, cores = limits(native.best), usable_cores()
    square, memory = np.ones((256, 256), np.float32), np.ones(1 << 17, np.int64)
    found = {
        "multiply": (2 * 256**3 / least_seconds(lambda: square @ square), best.multiply("f32", repeat=REPEAT)),
        "read": (memory.nbytes / least_seconds(memory.sum), best.read(memory.nbytes, repeat=REPEAT)),
    }
    for what, (speed, limit) in found.items():
        assert 0.2 * limit / cores < speed < 1.05 * limit, (what, speed, limit)


@pytest.mark.slow
@pytest.mark.alone
def test_smaller_numbers_and_wider_registers_are_not_slower() -> None:
    assert native is not None
    found = {isa: {kind: limits(isa).multiply(kind, repeat=REPEAT) for kind in KINDS} for isa in native.usable}
    for isa, speeds in found.items():
        for kind, speed in speeds.items():
            # A processor may have twice as many units for one kind as for the other.
            assert 0.9 < speed / speeds["f32"] < 2 * PRODUCTS.get((isa, kind), VECTORS[kind]), (isa, kind)
    assert found[native.best]["f32"] > 0.9 * found["generic"]["f32"]


def least_seconds(work: Callable[[], object]) -> float:
    """Rates of the fastest time, with as many threads as numpy takes."""
    seconds = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def test_every_method_is_compared_with_a_loop_of_its_numbers() -> None:
    for method in METHODS:
        assert kernels.KIND_OF_METHOD[method.partition(" ")[0]] in KINDS, method


def table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[list[str]]:
    """The cells of each line."""
    monkeypatch.setattr(kernels, "QUANTIZED_SIZES", ((64, 256),))
    monkeypatch.setattr(kernels, "PLAIN_SIZES", ((64, 256),))
    monkeypatch.setattr(sys, "argv", ["kernels", "--repeat", "1", *arguments])
    kernels.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_has_a_line_for_each_format_rows_set_and_method(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native is not None
    sets = list(dict.fromkeys((native.usable[0], native.usable[-1])))
    found = table(
        capsys, monkeypatch, "--formats", "q4_k", "bf16", "--rows", "1", "5", "--method", "fastest", "--isa", *sets
    )
    wanted = [
        (f"{form} {rows} rows, 64 x 256", way)
        for form, ways in (
            ("q4_k", [f"{isa} fastest" for isa in sets]),
            ("bf16", ["XLA", *(f"C++ {isa}" for isa in sets)]),
        )
        for rows in (1, 5)
        for way in ways
    ]
    assert [(line[0], line[1]) for line in found] == wanted
    assert all(float(line[2]) > 0 and line[4].endswith("%") and line[6].endswith("%") for line in found)


def test_a_set_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="no mmx here; there is: generic"):
        kernels.instruction_sets(native, ["mmx"])
    assert native is not None
    assert kernels.instruction_sets(native, ["all"]) == list(native.usable)
    assert kernels.instruction_sets(native, None) == [native.best]
