"""What kernels are compared with, and the table of kernels."""

from __future__ import annotations

import sys

import pytest

from benchmarks import kernels
from benchmarks.limits import KINDS, limits
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.matrices import METHODS

native = library()
pytestmark = [pytest.mark.skipif(native is None, reason="the C++ library is not built"), pytest.mark.once]


def test_loops_read_and_multiply_at_speeds_that_a_machine_can_have() -> None:
    assert native is not None
    for isa in {native.usable[0], native.usable[-1]}:
        assert 1e8 < limits(isa).read(1 << 20) < 1e13
        for kind in KINDS:
            assert 1e8 < limits(isa).multiply(kind) < 1e15, (isa, kind)


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
