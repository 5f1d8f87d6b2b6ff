"""Tokens are cut out of texts as a search from left to right finds them, the longest first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.tokenizer.cutter import MOST_BEGINS, TokenCutter

FEW = {"<|a|>": 1, "<|a|>b": 2, "x": 3, "<b": 4}
MANY = {**FEW, **{f"{letter}{letter}>": 10 + i for i, letter in enumerate("cdefghijk")}}


def searched(tokens: dict[str, int], text: str) -> Iterator[str | int]:
    at = begin = 0
    while at < len(text):
        found = max((token for token in tokens if text.startswith(token, at)), key=len, default=None)
        if found is None:
            at += 1
            continue
        if begin < at:
            yield text[begin:at]
        yield tokens[found]
        at = begin = at + len(found)
    if begin < at:
        yield text[begin:]


@pytest.mark.parametrize("tokens", [FEW, MANY, {}])
@given(text=st.text(st.sampled_from("<|a>bxcé"), max_size=40))
def test_pieces_are_those_of_a_search(tokens: dict[str, int], text: str) -> None:
    assert list(TokenCutter(tokens).cut(text)) == list(searched(tokens, text))


def test_there_are_few_and_many_beginnings() -> None:
    assert len({token[:2] for token in FEW}) <= MOST_BEGINS < len({token[:2] for token in MANY})
