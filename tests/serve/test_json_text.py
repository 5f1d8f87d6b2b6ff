"""A body that arrives in any chunks is what a parser makes of it as a whole; long strings do not reach the parser."""

from __future__ import annotations

import itertools
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.serve.json_gauge import JsonGauge
from llmjax.serve.json_text import JsonText
from llmjax.serve.limits import BodyLimits

# Characters of one to four bytes, and those that are written as an escape, as a pair of them, or look like one.
strings = st.lists(
    st.sampled_from(["a", "\\", '"', "\n", "é", "\u2028", "😀", "\\ud83d", "\x00", "u"]), max_size=30
).map("".join)
values = st.recursive(
    st.none() | st.integers(-(2**31), 2**31) | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=10,
)


def read(chunks: list[bytes]) -> JsonText:
    gauge, text = JsonGauge(BodyLimits(bytes=10**9)), JsonText()
    for chunk in chunks:
        within = gauge.feed(chunk)
        text.add(chunk, within=within, inside=gauge.inside)
    return text


def value_of(text: JsonText) -> Any:
    value = orjson.loads(text.short)
    return text.restore(value) if text.has_marks else value


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(value=values, ascii=st.booleans(), cuts=st.lists(st.integers(0, 10**6), max_size=12))
@settings(max_examples=600)
def test_any_chunks_give_what_the_whole_gives(value: Any, ascii: bool, cuts: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=ascii).encode()
    assert value_of(read(cut(text, cuts))) == value


@given(value=values, ascii=st.booleans())
def test_byte_by_byte(value: Any, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii).encode()
    assert value_of(read([bytes([byte]) for byte in text])) == value


@given(
    text=st.lists(
        st.sampled_from(
            [b'"', b"\\", b"u", b"d83d", b"\\ud83d", b"\\ude00", b"a", b"\xc3", b"\xa9", b"\n", b",", b"[", b"]"]
        ),
        max_size=30,
    ).map(b"".join),
    cuts=st.lists(st.integers(0, 10**6), max_size=12),
)
@settings(max_examples=600)
def test_what_is_not_json_is_refused_however_it_is_cut(text: bytes, cuts: list[int]) -> None:
    whole = b'["' + text + b'"]'

    def result(chunks: list[bytes]) -> Any:
        try:
            return value_of(read(chunks))
        except orjson.JSONDecodeError:
            return orjson.JSONDecodeError

    assert result(cut(whole, cuts)) == result([whole])


@pytest.mark.parametrize("character", ["a", "é", "😀", "\n", "\\", "\x01"])
@pytest.mark.parametrize("ascii", [True, False])
def test_the_parser_does_not_meet_a_long_string(character: str, ascii: bool) -> None:
    value = {"prompt": character * 100_000, "key" * 50_000: ["x", character * 50_001]}
    text = json.dumps(value, ensure_ascii=ascii).encode()
    found = read([text[i : i + 4099] for i in range(0, len(text), 4099)])
    assert len(found.short) < 50_000 and value_of(found) == value


def test_nothing_is_kept_of_what_is_cleared() -> None:
    text = read([b'["' + b"a" * 100, b"b" * 100, b"c" * 100])
    assert text.has_marks
    text.clear()
    assert text.short == b"" and not text.has_marks
