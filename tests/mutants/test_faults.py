"""Faults have a place in the product as it is now, and tests that look for them."""

from __future__ import annotations

import pytest

from tests.import_graph import ROOT
from tests.mutants.faults import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_fault_can_be_made(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text(encoding="utf-8").count(mutant.before) == 1
    assert mutant.before != mutant.after
    assert [test for test in mutant.tests if not (ROOT / test).exists()] == []
