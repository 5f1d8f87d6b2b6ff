"""Durations as Ollama's clients write them."""

from __future__ import annotations

import math

import pytest

from llmjax.durations import parse_duration

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    "text,seconds",
    [
        (5, 5.0),
        (0, 0.0),
        ("0", 0.0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("300ms", 0.3),
        (" 24h ", 86400.0),
        (0.5, 0.5),
        ("3600", 3600.0),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "5 minutes", "5d", "1m-2s", "five", "nan", math.nan, "1h 30m"])
def test_what_is_none(text: str | float) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)
