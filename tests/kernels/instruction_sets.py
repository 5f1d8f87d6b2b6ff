"""The instruction sets that tests of the C++ kernels run with."""

from __future__ import annotations

from typing import Any

import pytest

from llmjax.kernels.cpu.library import library

NATIVE = library()
USABLE = [] if NATIVE is None else list(NATIVE.usable)


def _shown() -> list[Any]:
    if NATIVE is None:
        return [pytest.param("any", marks=pytest.mark.skip(reason="the C++ library is not built"))]
    lacking = pytest.mark.skip(reason="this machine or build lacks it")
    return [isa if isa in USABLE else pytest.param(isa, marks=lacking) for isa in NATIVE.isas]


INSTRUCTION_SETS = _shown()
"""For ``pytest.mark.parametrize``: all that the library knows; what the machine lacks is shown as skipped."""

each_isa = pytest.mark.parametrize("isa", USABLE, indirect=True)
"""A test with each instruction set in turn, by the fixture ``isa`` of tests/conftest.py: whichever one is forced, the
programs are the same, so that a test which keeps its jitted functions compiles them once."""
