"""Prompt lookup compared with a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmjax.engine.drafts import ngrams
from llmjax.engine.drafts.ngrams import NgramIndex


def searched(tokens: list[int], *, shortest: int, longest: int, count: int) -> tuple[int, ...]:
    """The continuation of the latest of the longest matches of the text's end."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        end = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == end:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + size + i])
                return tuple(text[len(tokens) :])
    return ()


@given(
    text=st.lists(st.integers(0, 3), max_size=15),
    added=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 9),
)
def test_continuations_are_those_of_a_search(
    text: list[int], added: list[list[int]], shortest: int, more: int, count: int
) -> None:
    tokens = list(text)
    index = NgramIndex(tokens, shortest=shortest, longest=shortest + more)
    for new in ([], *added):
        tokens.extend(new)
        # Few places are looked at; here all are found among them.
        if max((tokens.count(token) for token in tokens), default=0) <= ngrams.CANDIDATES:
            found = index.continuation(count)
            assert found == searched(tokens, shortest=shortest, longest=shortest + more, count=count)


def test_text_that_repeats_goes_on_repeating() -> None:
    index = NgramIndex([9, 1, 2, 3, 1, 2, 3, 1], shortest=2, longest=4)
    assert index.continuation(7) == (2, 3, 1, 2, 3, 1, 2)


def test_a_long_text_of_one_token_takes_few_comparisons() -> None:
    tokens = [7] * 100_000
    index = NgramIndex(tokens, shortest=2, longest=5)
    assert index.continuation(3) == (7, 7, 7)
    assert len(index._before) == len(tokens)
    assert index._before.itemsize == 4


def test_without_a_match_there_is_nothing() -> None:
    assert NgramIndex([], shortest=1, longest=1).continuation(3) == ()
    assert NgramIndex([1], shortest=1, longest=1).continuation(3) == ()
    assert NgramIndex([1, 2, 3, 2], shortest=2, longest=3).continuation(3) == ()
