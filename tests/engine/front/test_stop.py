"""Stop strings compared with a search that sees the text character by character."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmjax.engine.front.stop import StopMatcher
from llmjax.parsing.choice import Parsers
from llmjax.parsing.content import ContentReading
from llmjax.parsing.parser import OutputParser
from llmjax.parsing.schemas import ToolSchemas

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


THINKS = Parsers(tools="hermes", reasoning="think")
PING = '<tool_call>\n{"name": "ping", "arguments": {"a": "Q:"}}\n</tool_call>'


def reading(*, one_call: bool = False, prompt: str = "") -> ContentReading:
    grammar = THINKS.grammar(with_tools=True, prompt=prompt)
    assert grammar is not None
    return ContentReading(parser=lambda: OutputParser(grammar, ToolSchemas()), one_call=one_call)


def watched(
    text: str, *, size: int, stops: list[str], include: bool = False, **fields: Any
) -> tuple[str, str | None, int | None]:
    """What is shown of a text that comes in pieces, what has ended it, and where."""
    matcher = StopMatcher(stops, include=include, reading=reading(**fields))
    shown = ""
    for at in range(0, len(text), size):
        shown += matcher.add(text[at : at + size])
        assert text.startswith(shown)
    return shown + matcher.finish(), matcher.found, matcher.end


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("<think>\nFirst list Q: and A: pairs.\n</think>\n\nParis.\nQ: next", "Q:", "\n\nParis.\n"),
        ("<think>a\n\nb</think>\n\nParis.\n\nThe", "\n\n", "\n\nParis."),
        ("<think>Q:</think>none", "Q:", "none"),
        (f"Hi.\n{PING} then Q: or", "Q:", f"{PING} then "),
        ("<tool_call> is a tag. Q: or", "Q:", "<tool_call> is a tag. "),
        ("<think>a</thi", "</thi", "</thi"),
        ("Q<tool_call>: no", "Q<t", ""),
        ("<think>Q</think>: no", "Q</think>:", "</think>: no"),
        ("a <tool_call", "_c", "a <tool"),  # known to be content at the end
        ("a <tool_call> Q: ", "Q:", "a <tool_call> "),
    ],
)
def test_stop_strings_are_looked_for_in_content_alone(text: str, stop: str, shown: str, size: int) -> None:
    told, found, end = watched(text, size=size, stops=[stop])
    assert told.endswith(shown) and text.startswith(told)
    assert (found, end) == ((None, None) if told == text else (stop, len(told) + len(stop)))
    included, _, _ = watched(text, size=size, stops=[stop], include=True)
    assert included == (told + found if found else text)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_may_end_with_its_first_call(size: int) -> None:
    call = PING.removesuffix("\n</tool_call>")
    told, found, end = watched(f"Q: I say\n{PING}\n{PING}", size=size, stops=["Z"], one_call=True)
    assert (told, found, end) == (f"Q: I say\n{call}", None, len(told))
    assert watched(f"No call, Q: {call[:-1]}", size=size, stops=[], one_call=True)[1:] == (None, None)
    assert watched(f"Q: I say\n{PING}", size=size, stops=["Q:"], one_call=True) == ("", "Q:", 2)


PIECES = ["<think>", "</think>", "<tool_call>", '{"name": "f", "arguments": {', "}}", "a", "b", "ab", "\n", " "]


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    stops=st.lists(letters, max_size=2),
    one_call=st.booleans(),
)
def test_any_text_of_an_answer_in_any_pieces(text: str, sizes: list[int], stops: list[str], one_call: bool) -> None:
    assume(stops or one_call)
    whole = watched(text, size=max(len(text), 1), stops=stops, one_call=one_call)
    matcher = StopMatcher(stops, include=False, reading=reading(one_call=one_call))
    shown, at = "", 0
    for size in sizes * (len(text) + 1):
        shown += matcher.add(text[at : at + size])
        at += size
    assert (shown + matcher.finish(), matcher.found, matcher.end) == whole
