"""Forms of answers as matchers: for every family, what may be written where a form and tools are demanded together."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from llmjax.constraints.compiler import GrammarCompiler
from llmjax.parsing.choice import HARMONY, Parsers
from llmjax.parsing.families import JSON_LIST, TOOLS
from llmjax.serve.answers import AnswerFormat
from llmjax.serve.forms import answer_form, held_to_tools
from llmjax.serve.protocol.chat import ChatRequest

SPECIAL = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<tool_call>", "</think>")
EOS = 256 + len(SPECIAL)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [TOOL],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
}


class Marked:
    """A tokenizer of bytes, markers and one token that ends a text."""

    all_special_ids = tuple(range(256, EOS + 1))

    def bytes_of_all(self, count: int) -> list[bytes]:
        return [*(bytes([i]) for i in range(256)), *(marker.encode() for marker in SPECIAL), b"<end>"][:count]

    def encode(self, text: str, *, parse_special: bool = True, **_: Any) -> list[int]:
        if not parse_special:
            return list(text.encode())
        parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
        return [id for part in parts for id in ([256 + SPECIAL.index(part)] if part in SPECIAL else part.encode())]

    def special_ids_in(self, markers: Sequence[str]) -> frozenset[int]:
        return frozenset(256 + i for i, special in enumerate(SPECIAL) if any(special in marker for marker in markers))

    def id_to_token(self, id: int) -> str:
        return SPECIAL[id - 256]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Marked(), vocab_size=EOS + 1, eos_token_ids=[EOS])  # type: ignore[arg-type]


def accepts(compiler: GrammarCompiler, text: str, *, tools: str, reasoning: str | None, **fields: Any) -> bool:
    body = ChatRequest.model_validate({**BODY, **fields})
    form = answer_form(body, AnswerFormat(), Parsers(tools=tools, reasoning=reasoning), tools=[TOOL])
    assert form is not None
    matcher = compiler.matcher(compiler.grammar(form)).deep_copy()
    return all(matcher.consume_token(token) for token in Marked().encode(text)) and matcher.is_accepting()


ANALYSIS = "<|channel|>analysis<|message|>Hm, {2}.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>'


@pytest.mark.parametrize("thought", ["", ANALYSIS])
def test_harmony(compiler: GrammarCompiler, thought: str) -> None:
    """The form is of the final channel, and calls have one of their own."""
    kinds = {"tools": HARMONY, "reasoning": HARMONY}
    assert accepts(compiler, thought + FINAL + '{"a": 2}', **kinds)
    assert accepts(compiler, thought + CALL, **kinds)
    assert not accepts(compiler, thought + FINAL + '{"b": 2}', **kinds)
    assert not accepts(compiler, thought + CALL.replace("add", "sub"), **kinds)
    assert not accepts(compiler, thought + FINAL + CALL, **kinds)


@pytest.mark.parametrize("family", sorted(TOOLS.keys() - {HARMONY, JSON_LIST}))
@pytest.mark.parametrize("reasoning", [None, "think"])
def test_every_family(compiler: GrammarCompiler, family: str, reasoning: str | None) -> None:
    kinds = {"tools": family, "reasoning": reasoning}
    before = "" if reasoning is None else "<think>I see {3}.</think>\n\n"
    assert accepts(compiler, before + '{"a": 2}', **kinds)
    assert not accepts(compiler, before + "two", **kinds)
    assert not accepts(compiler, before + '[{"a": 2}]', **kinds)


@pytest.mark.parametrize(
    ("family", "call", "wrong"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
            '<tool_call>\n{"name": "add", "arguments": {"b": 2}}\n</tool_call>',
        ),
        ("llama3_json", '{"name": "add", "parameters": {"a": 2}}', '{"name": "sub", "parameters": {"a": 2}}'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 2}', '[TOOL_CALLS]add[ARGS]{"a": "2"}'),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>", "<function"),
        ("pythonic", "[add(a=2)]", "[2]"),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>", "<arg_key>"),
    ],
)
def test_calls_beside_a_form(compiler: GrammarCompiler, family: str, call: str, wrong: str) -> None:
    kinds = {"tools": family, "reasoning": "think"}
    before = "<think>I see.</think>\n"
    assert accepts(compiler, before + call, **kinds)
    assert not accepts(compiler, before + wrong, **kinds)
    assert not accepts(compiler, before + call, **kinds, response_format=None, guided_json=json.dumps(SCHEMA))


def test_references_of_a_bare_calls_schema(compiler: GrammarCompiler) -> None:
    tree = {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "size": {"$ref": "#/$defs/size"}},
        "required": ["size"],
        "$defs": {"size": {"enum": [1, 2]}},
    }
    body = ChatRequest.model_validate(BODY)
    tools = [TOOL, {"type": "function", "function": {"name": "plant", "parameters": tree}}]
    form = answer_form(body, AnswerFormat(), Parsers(tools="llama3_json", reasoning=None), tools=tools)
    assert form is not None
    for size, fits in ((2, True), (3, False)):
        text = f'{{"name": "plant", "parameters": {{"child": {{"size": {size}}}, "size": 1}}}}'
        matcher = compiler.matcher(compiler.grammar(form)).deep_copy()
        assert (all(map(matcher.consume_token, text.encode())) and matcher.is_accepting()) is fits


def test_what_holds_calls_to_tools() -> None:
    body = ChatRequest.model_validate(BODY)
    held = {
        family: held_to_tools(answer_form(body, AnswerFormat(), Parsers(tools=family, reasoning=None), tools=[TOOL]))
        for family in ("hermes", "llama3_json", "qwen3_coder")
    }
    assert held == {"hermes": True, "llama3_json": True, "qwen3_coder": False}
    assert not held_to_tools(None)
