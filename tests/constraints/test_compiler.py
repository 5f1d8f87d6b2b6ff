"""Grammars as matchers: what takes too much is refused in time, and what is large is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from llmjax.constraints import matchers
from llmjax.constraints.compiler import GrammarCompiler
from llmjax.errors import InvalidRequest
from llmjax.sampling.structured import StructuredOutputsParams
from tests.constraints.test_schema_suite import Bytes

pytestmark = pytest.mark.smoke

EOS = 256


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Bytes(), vocab_size=EOS + 1, eos_token_ids=[EOS])  # type: ignore[arg-type]


def accepts(compiler: GrammarCompiler, text: str, **form: Any) -> bool:
    """Whether a form holds a text, and nothing more."""
    grammar = compiler.grammar(StructuredOutputsParams(**form))
    compiler.check(grammar)
    matcher = compiler.matcher(grammar).deep_copy()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


HOURS = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(1, 64)]}  # 3,500 characters
MEMORY = "a?" * 50_000 + "a" * 10_000  # would take gigabytes; the library gives up before


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"json": HOURS}, "it takes more than"),  # of time or of memory: whichever a machine comes to first
        ({"regex": MEMORY}, "too big"),
    ],
)
def test_what_would_not_end_is_refused(compiler: GrammarCompiler, form: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        compiler.check(compiler.grammar(StructuredOutputsParams(**form)), field="response_format")
    assert raised.value.field == "response_format"
    assert accepts(compiler, "fine", choice=["fine"])  # the next grammar is tried in a new process


def test_what_is_wrong_is_told_as_the_library_says_it(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"regex: .*unclosed character class") as raised:
            compiler.check(compiler.grammar(StructuredOutputsParams(regex="[a")), field="regex")
        assert raised.value.field == "regex"


def test_objects_have_no_properties_that_are_not_named(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tagged = {"structural_tag": {"format": {"type": "json_schema", "json_schema": schema}}}
    more = '{"a": 1, "b": 2}'
    for form in ({"json": schema}, tagged):
        assert accepts(compiler, '{"a": 1}', **form) and not accepts(compiler, more, **form)
    for opened in (
        {"json": {**schema, "additionalProperties": True}},
        {"json": schema, "disable_additional_properties": False},
        {**tagged, "disable_additional_properties": False},
    ):
        assert accepts(compiler, more, **opened)


def test_a_grammar_is_compiled_where_it_is_asked_for_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(Bytes(), vocab_size=EOS + 1, eos_token_ids=[EOS])  # type: ignore[arg-type]
    made: list[str] = []

    def counted(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
        made.append(grammar)
        return matchers.make_matcher(vocabulary, grammar)

    monkeypatch.setattr("llmjax.constraints.compiler.make_matcher", counted)
    grammar = compiler.grammar(StructuredOutputsParams(regex="a+"))
    assert not compiler.known(grammar)
    compiler.check(grammar)
    assert compiler.known(grammar) and made == []
    assert compiler.matcher(grammar) is compiler.matcher(grammar)
    compiler.check(grammar)
    assert made == [grammar]


NAMES = {f"k{i}": {"type": "integer"} for i in range(3000)}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"choice": [f"choice {i}" for i in range(4096)]}, "choice 4095"),
        ({"json": {"type": "object", "properties": NAMES, "additionalProperties": False}}, '{"k7": 1, "k2999": 2}'),
    ],
    ids=["choices", "optional properties"],
)
def test_large_forms(compiler: GrammarCompiler, form: dict[str, Any], text: str) -> None:
    assert accepts(compiler, text, **form)
    assert not accepts(compiler, text.replace("9", "x"), **form)


def test_a_grammar_that_needs_more_at_the_beginning_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = matchers.Vocabulary(
        tokens=[bytes([i]) for i in range(256)] + [b""], special=[EOS], eos=[EOS]
    ).for_matchers()
    grammar = json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$"}}]})
    monkeypatch.setattr(matchers, "_INITIAL_FUEL", (100,))
    assert "too big" in matchers.make_matcher(vocabulary, grammar).get_error()
    monkeypatch.setattr(matchers, "_INITIAL_FUEL", (100, 200_000))
    assert not matchers.make_matcher(vocabulary, grammar).is_error()
