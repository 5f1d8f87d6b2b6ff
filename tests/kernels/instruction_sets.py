"""The instruction sets that tests of the C++ kernels run with."""

from __future__ import annotations

from typing import Any

import pytest

from llmjax.kernels.cpu.library import library


def _instruction_sets() -> list[Any]:
    native = library()
    if native is None:
        return [pytest.param("any", marks=pytest.mark.skip(reason="the C++ library is not built"))]
    lacking = {
        isa: pytest.mark.skip(reason=f"this machine or build lacks {isa}") for isa in {*native.isas} - {*native.usable}
    }
    return [pytest.param(isa, marks=lacking[isa]) if isa in lacking else isa for isa in native.isas]


INSTRUCTION_SETS = _instruction_sets()
"""For ``pytest.mark.parametrize``: all that the library knows; what the machine lacks is shown as skipped."""
USABLE = [isa for isa in INSTRUCTION_SETS if isinstance(isa, str)]
