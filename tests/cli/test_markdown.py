"""Markdown shown while it arrives: what is printed for good never changes, and nothing is lost."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from llmjax.cli.markdown import MarkdownStream, finished_length


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n\n\ntwo\n\nthree", "one\n\n\n\ntwo\n\n"),
        ("- item\n\n  more of it", ""),
        ("- item\n\n  more of it\n\nafter", "- item\n\n  more of it\n\n"),
        ("```\na\n\nb\n", ""),
        ("```py\na\n\nb\n```\n\nafter", "```py\na\n\nb\n```\n\n"),
        ("~~~\n```\n\nx", ""),
        ("a\n\n```\nb\n\nc", "a\n\n"),
    ],
)
def test_finished_blocks(text: str, finished: str) -> None:
    assert text[: finished_length(text)] == finished


@given(st.text(st.sampled_from("ab \n`-#"), max_size=60))
def test_what_is_finished_stays_finished(text: str) -> None:
    for end in range(len(text)):
        done = finished_length(text[:end])
        assert done <= finished_length(text[: end + 1])
        assert done <= end


def test_all_of_it_is_rendered_once() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40)
    with MarkdownStream(console) as stream:
        for character in "# Head\n\nsome **bold**\ntext\n\n- item\n\n```\ncode\n```\n\nthe end":
            stream.write(character)
    shown = out.getvalue()
    for word in ("Head", "bold", "item", "code", "the end"):
        assert shown.count(word) == 1, shown
    assert "**" not in shown
    assert shown.index("Head") < shown.index("bold") < shown.index("code") < shown.index("the end")
