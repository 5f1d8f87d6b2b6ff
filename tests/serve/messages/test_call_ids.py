"""Ids of calls in Anthropic's form, there and back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.serve.messages.call_ids import read_id, shown_id


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_ids_that_models_write_come_back(id: str) -> None:
    shown = shown_id(id)
    assert re.fullmatch(r"toolu_[a-zA-Z0-9_-]*", shown)
    assert read_id(shown) == id or id.startswith("call_")


@pytest.mark.parametrize("id", ["toolu_01A", "call_1", "", "toolu_own_", "toolu_own_é", "toolu_own_a", "toolu_own__w"])
def test_other_ids_stay(id: str) -> None:
    assert read_id(id) in (id, "")


def test_our_own() -> None:
    assert shown_id("call_0123") == "toolu_0123"
    assert read_id(shown_id("functions.get_weather:0")) == "functions.get_weather:0"
