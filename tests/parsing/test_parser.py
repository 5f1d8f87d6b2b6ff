"""Outputs of every family, whole and cut anywhere."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.parsing.choice import HARMONY, Parsers
from llmjax.parsing.events import Content, Event, Message
from llmjax.parsing.families import TOOLS as FAMILIES
from llmjax.parsing.parser import OutputParser
from llmjax.parsing.reasoning import REASONING
from llmjax.parsing.schemas import ToolSchemas
from tests.parsing.golden import CASES, TOOLS

SCHEMAS = ToolSchemas(TOOLS)


def parser(tools: str | None, reasoning: str | None, prompt: str = "", *, with_tools: bool = True) -> OutputParser:
    with_tools = with_tools and tools is not None
    grammar = Parsers(tools=tools, reasoning=reasoning).grammar(with_tools=with_tools, prompt=prompt)
    assert grammar is not None
    return OutputParser(grammar, SCHEMAS)


def of(case: Any) -> OutputParser:
    return parser(case.tools, case.reasoning, case.prompt, with_tools=case.with_tools)


def parsed(parser: OutputParser, pieces: Iterable[str]) -> Message:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return Message.of([*events, *parser.finish()])


def check(message: Message, case: Any) -> None:
    calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
    assert calls == list(case.calls)
    assert (message.content, message.reasoning) == (case.content, case.thought)
    if case.ids:
        assert [call.id for call in message.calls] == list(case.ids)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden(case: Any) -> None:
    check(parsed(of(case), [case.text]), case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_split(case: Any) -> None:
    text = case.text
    whole = parsed(of(case), [text])
    splits = [[text[:at], text[at:]] for at in range(len(text))]
    for pieces in [list(text), [text[at : at + 3] for at in range(0, len(text), 3)], *splits]:
        assert parsed(of(case), pieces) == whole


def test_every_family_has_a_golden_text() -> None:
    assert {case.tools for case in CASES} - {None} == {*FAMILIES}
    missing = {*REASONING, HARMONY} - {case.reasoning for case in CASES}
    assert missing == {"kimi_vl", "exaone", "apertus"}  # between markers of their own, as "think" is


WORDS = [
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    '"',
    "'",
    "\\",
    ",",
    ":",
    "=",
    "<",
    ">",
    "\n",
    " ",
    "a",
    "1",
    "now",
    "get_weather",
]
WORDS += [
    '{"name": "now", "arguments": {',
    '"arguments": ',
    '"name": "',
    "now(",
    "get_weather(days=",
    "call:now{",
    "```",
]
ALL = [(tools, reasoning) for tools in FAMILIES for reasoning in ("think", None)] + [(HARMONY, HARMONY)]


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize(("tools", "reasoning"), ALL)
def test_any_text_in_any_pieces(tools: str, reasoning: str | None, data: st.DataObject) -> None:
    grammar = FAMILIES[tools]
    words = st.sampled_from([*WORDS, *sorted(set(grammar.markers)), "<think>", "</think>"])
    pieces = data.draw(st.lists(words, max_size=24))
    text = "".join(pieces)
    whole = parsed(parser(tools, reasoning), [text])
    assert parsed(parser(tools, reasoning), text) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert parsed(parser(tools, reasoning), [text[:cut], text[cut:]]) == whole
    assert all(call.name for call in whole.calls)


# What families write around an answer, beside its text.
FRAMES = ("</think>", "<channel|>", "<|close|>", "<|message_sep|>", "all\n")


@pytest.mark.parametrize("case", [case for case in CASES if not case.calls], ids=str)
def test_plain_text_is_not_touched(case: Any) -> None:
    framed = any(mark in case.text for mark in FRAMES)
    if not case.thought and case.reasoning != HARMONY and not framed:
        assert case.content == case.text


def test_arguments_come_as_they_are_written() -> None:
    made = parser("hermes", None)
    shown = [
        event
        for piece in ('<tool_call>{"name": "now", "arguments": {"a": "bc', "de", '"}}')
        for event in made.feed(piece)
    ]
    assert [getattr(event, "text", "") for event in shown] == ["", '{"a": "bc', "de", '"}']
    made = parser("qwen3_coder", None)
    made.feed("<tool_call><function=get_weather><parameter=city>")
    assert [event.text for event in [*made.feed("\nKö"), *made.feed("ln\n")]] == ["Kö", "ln"]


HALF = "\\ud83d"  # of a surrogate pair, as JSON's escapes write it


@pytest.mark.parametrize(
    ("tools", "text", "name", "arguments"),
    [
        ("hermes", f'<tool_call>{{"name": "now{HALF}", "arguments": {{}}}}', "now\ufffd", "{}"),
        ("hermes", f'<tool_call>{{"name": "now", "arguments": "{HALF}\\ude00{HALF}"}}', "now", "😀\ufffd"),
        ("qwen3_coder", f'<function=now><parameter=a>["{HALF}"]</parameter>', "now", '{"a": ["\ufffd"]'),
        ("glm45", f'<tool_call>now<arg_key>a</arg_key><arg_value>"{HALF}b"</arg_value>', "now", '{"a": "\ufffdb"'),
    ],
)
def test_half_a_surrogate_pair_is_no_character(tools: str, text: str, name: str, arguments: str) -> None:
    (call,) = parsed(parser(tools, None), text).calls
    assert (call.name, call.arguments) == (name, arguments)


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    made = parser("hermes", "think")
    assert made.feed("Hel") == [Content("Hel")]
    assert made.feed("lo <") == [Content("lo")]
    assert made.feed("b>") == [Content(" <b>")]


def test_reasoning_has_places() -> None:
    made = parser("hermes", "think")
    text = "<think>ab</think>c"
    parsed(made, text)
    assert [at for at in range(len(text)) if made.reasons_at(at)] == [7, 8]
    made = parser(HARMONY, HARMONY)
    text = "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>final<|message|>c"
    parsed(made, text)
    assert [text[at] for at in range(len(text)) if made.reasons_at(at)] == ["a", "b"]


ADVERSARIAL = {
    "openings": ("hermes", "<tool_call>"),
    "half markers": ("hermes", "<tool_cal"),
    "objects without a name": ("hermes", '<tool_call>{"a": 1}'),
    "deep": ("hermes", '<tool_call>{"name": "a", "arguments": ' + "[" * 1000),
    "quotes": ("hermes", '<tool_call>{"x'),
    "spaces": ("hermes", "          "),
    "calls": ("hermes", '<tool_call>{"name": "a", "arguments": {}}</tool_call>'),
    "keys": ("hermes", '<tool_call>{"name": "a", "b": 1, "b'),
    "names": ("glm45", "<tool_call>" + "a" * 255),
    "escapes": ("hermes", '<tool_call>{"name": "\\\\\\'),
    "python": ("pythonic", "[now(a='"),
    "python deep": ("lfm2", "<|tool_call_start|>[f(a=" + "[" * 500),
    "python quotes": ("lfm2", "<|tool_call_start|>[f(a=''''''''"),
    "parameters": ("qwen3_coder", "<function=f><parameter=a>1</parameter>"),
    "values": ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>[1"),
    "bare": ("gemma4", '<|tool_call>call:f{a:{b<|"|>'),
    "headers": ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant"),
    "punctuation": ("kimi_k2", "<|tool_calls_section_begin|>)))"),
    "unmarked": ("llama3_json", '{"name": "now"};'),
    "elements": ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="now">]<]minimax[>[<a>'),
    "brackets": ("minimax_m3", "]<]minimax[>[<tool_call>]]]]]]]"),
    "lines": ("command_r", "Action: \n"),
}


def seconds(tools: str, text: str, *, piece: int) -> float:
    """The least of three runs, in which nobody collects the garbage of other tests."""
    gc.disable()
    try:
        return min(_seconds(tools, text, piece) for _ in range(3))
    finally:
        gc.enable()


def _seconds(tools: str, text: str, piece: int) -> float:
    made = parser(tools, None)
    start = time.thread_time()
    parsed(made, [text[at : at + piece] for at in range(0, len(text), piece)])
    return time.thread_time() - start


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("size", [2**17, 2**20])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_time_is_linear(name: str, size: int) -> None:
    tools, unit = ADVERSARIAL[name]
    text = unit * (size // len(unit))
    small = seconds(tools, text[: size // 16], piece=size)
    assert seconds(tools, text, piece=size) < 4 * (16 * small + 0.1)  # quadratic: 256 times as long
    small = seconds(tools, text[: 2**11], piece=4)
    assert seconds(tools, text[: 2**15], piece=4) < 4 * (16 * small + 0.1)
