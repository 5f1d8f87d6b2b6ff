"""Names of measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.points import DECODE_PROMPT, DEFAULT, Point, parse_points
from llmjax.errors import ConfigError


def test_the_default_points() -> None:
    assert parse_points(DEFAULT) == [
        Point("decode", 1, DECODE_PROMPT),
        Point("decode", 16, DECODE_PROMPT),
        Point("decode", 32, DECODE_PROMPT),
        Point("prefill", 1, 512),
        Point("ttft", 16, 512),
        Point("load"),
    ]


def test_what_a_time_is_for() -> None:
    decode, prefill, ttft, load = parse_points("decode8x1024, prefill64, ttft4x128, load")
    assert decode == Point("decode", 8, 1024)
    assert [point.tokens for point in (decode, prefill, ttft, load)] == [8, 64, 512, None]
    names = ["decode, 8 streams after 1024", "prefill of 64", "first token, 4 × 128", "start to first token"]
    assert [point.name for point in (decode, prefill, ttft, load)] == names


@pytest.mark.parametrize("name", ["", "decode", "decode0", "prefill0", "ttft16", "ttft0x512", "loads", "decode1,,load"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--points: "):
        parse_points(name)


@given(st.text(alphabet="decoprfilt0123456789x,  ٣", max_size=24))
def test_any_text_is_points_or_an_error(text: str) -> None:
    try:
        points = parse_points(text)
    except ConfigError:
        return
    assert len(points) == text.count(",") + 1
    assert all(point.streams >= 1 and point.prompt >= 1 for point in points)
