"""docs/supported-models.md says what the tests say."""

from __future__ import annotations

from llmjax.models.registry import FAMILIES
from tests.models.supported import BEST_KNOWN, PAGE, page


def test_every_architecture_has_a_checkpoint_that_is_known() -> None:
    assert BEST_KNOWN.keys() == FAMILIES.keys()


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.models.supported`"
