"""Budgets of reasoning: marks as tokens may write them, and when reasoning has to be closed."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from llmjax.constraints.thinking import Thinking, ThinkingBudget, TokenMark

PIECES = [b"", b"a", b"b", b"ab", b"ba", b"aa", b"aab", b"bab", b"abab", b"cabac", b"c", "ä".encode(), b"\xc3", b"\xa4"]


def places(mark: TokenMark, tokens: list[int]) -> list[int]:
    """How many tokens there are where the mark is complete; it begins anew each time."""
    state, found = 0, []
    for count, token in enumerate(tokens, start=1):
        state = mark.after(state, token)
        if state == len(mark.states):
            found.append(count)
            state = 0
    return found


@given(
    text=st.sampled_from(["a", "ab", "aab", "abab", "aaba", "cabac", "ä", "äab"]),
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
)
@example(text="abab", tokens=[1, 0, 7])  # a token that writes nothing
def test_a_mark_is_found_however_it_is_written(text: str, tokens: list[int]) -> None:
    expected, written = [], b""
    for count, token in enumerate(tokens, start=1):
        written += PIECES[token]
        if text.encode() in written:
            expected.append(count)
            written = b""
    assert places(TokenMark.of(text, PIECES), tokens) == expected


def test_a_mark_that_is_a_token_needs_nothing_else() -> None:
    mark = TokenMark.of("</think>", [b"x", b"</think>", b"thin"])
    assert mark.states[0] == {1: len("</think>")} and places(mark, [0, 1, 2, 1]) == [2, 4]


def budget(tokens: int, *, inside: bool) -> ThinkingBudget:
    pieces = [b"<t>", b"</t>", b"x"]
    return ThinkingBudget(
        tokens=tokens,
        inside=inside,
        start=TokenMark.of("<t>", pieces),
        end=TokenMark.of("</t>", pieces),
        closing=(1,),
    )


@given(st.integers(0, 8), st.booleans(), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_only_what_reasons_at_the_budget_is_closed(tokens: int, inside: bool, written: list[int]) -> None:
    thinking, reasons = Thinking(budget(tokens, inside=inside)), inside
    for token in written[:tokens]:
        assert not thinking.over
        thinking.accept(token)
        reasons = token == 0 or (reasons and token != 1)
    assert thinking.over and thinking.closing == ((1,) if reasons else ())
