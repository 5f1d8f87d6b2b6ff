"""Stop strings against a search that sees the text character by character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.engine.stop import StopMatcher

pytestmark = pytest.mark.once  # no device computes here

letters = st.text("ab", min_size=1, max_size=4)


def oracle(text: str, allowed: list[bool], stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """What is shown of ``text`` and the stop that ended it; ``allowed`` says which characters may complete one."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if allowed[end - 1] and text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def begun(text: str, stops: list[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string without completing it."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(
    chunks=st.lists(st.text("abc", max_size=5), max_size=8),
    stops=st.lists(letters, max_size=4),
    include=st.booleans(),
    min_chunks=st.integers(0, 5),
)
def test_any_chunking(chunks: list[str], stops: list[str], include: bool, min_chunks: int) -> None:
    matcher = StopMatcher(stops, include=include)
    shown, text, allowed = "", "", []
    for i, chunk in enumerate(chunks):
        text += chunk
        allowed += [i >= min_chunks] * len(chunk)
        shown += matcher.add(chunk, may_stop=i >= min_chunks)
        expected, found = oracle(text, allowed, stops, include=include)
        assert matcher.found == found
        # Nothing is shown that might still turn out to belong to a stop string, and all else is.
        assert shown == (expected if found else text[: len(text) - begun(text, stops)])
    if matcher.found is None:
        shown += matcher.finish()
    assert shown == oracle(text, allowed, stops, include=include)[0]


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(["</s>"], include=False)
    assert [matcher.add(part) for part in ("one<", "/s", ">two", "three")] == ["one", "", "", ""]
    assert matcher.found == "</s>"
    assert matcher.finish() == ""


def test_a_stop_string_said_too_early_is_text() -> None:
    matcher = StopMatcher(["b", "abc"], include=False)
    assert matcher.add("ab", may_stop=False) == ""  # "abc" may still come
    assert matcher.add("x") == "abx"
    assert matcher.found is None
