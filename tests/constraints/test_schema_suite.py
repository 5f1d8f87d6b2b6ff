"""The JSON-Schema-Test-Suite against the grammars of schemas: what a schema does not allow is never accepted, and what
cannot be enforced is refused by name.

``golden/draft2020-12.jsonl`` holds the required cases of draft 2020-12 as jsonschema 4.26.0 ships them, a line each
(MIT, ``golden/LICENSE``).
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from llmjax.constraints.compiler import GrammarCompiler
from llmjax.errors import InvalidRequest
from llmjax.sampling.structured import StructuredOutputsParams

CASES = [json.loads(line) for line in (Path(__file__).parent / "golden" / "draft2020-12.jsonl").open()]
# Ways of writing one value.
WRITERS = (
    partial(json.dumps, ensure_ascii=False),
    partial(json.dumps, ensure_ascii=False, separators=(",", ":")),
    partial(json.dumps, indent=1),
)
NOT_ENFORCED = {
    "contains": ["contains"],
    "dependentRequired": ["dependentRequired"],
    "dependentSchemas": ["dependentSchemas"],
    "if-then-else": ["if", "then", "else"],
    "maxContains": ["contains", "maxContains"],
    "minContains": ["contains", "minContains"],
    "not": ["not"],
    "oneOf": ["oneOf"],
    "propertyNames": ["propertyNames"],
    "unevaluatedItems": ["unevaluatedItems"],
    "unevaluatedProperties": ["unevaluatedProperties"],
    "uniqueItems": ["uniqueItems"],
}


class Bytes:
    """A tokenizer whose tokens are the bytes, and one that ends a text."""

    all_special_ids = (256,)

    def bytes_of_all(self, count: int) -> list[bytes]:
        return [*[bytes([i]) for i in range(count - 1)], b"<end>"]

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Bytes(), vocab_size=257, eos_token_ids=[256])  # type: ignore[arg-type]


def compiled(compiler: GrammarCompiler, schema: Any) -> LLMatcher:
    grammar = compiler.grammar(StructuredOutputsParams(json=json.dumps(schema), disable_additional_properties=False))
    compiler.check(grammar)
    return compiler.matcher(grammar)


def accepts(matcher: LLMatcher, text: str) -> bool:
    matcher, tokens = matcher.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_what_a_schema_does_not_allow_is_never_accepted(compiler: GrammarCompiler) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for case in CASES:
        try:
            matcher = compiled(compiler, case["schema"])
        except InvalidRequest as error:
            assert error.field == "structured_outputs" and "\n" not in str(error)
            counts["refused"] += 1
            continue
        counts["compiled"] += 1
        for test in case["tests"]:
            for written in {write(test["data"]) for write in WRITERS}:
                if not accepts(matcher, written):
                    counts["not accepted"] += 1
                elif test["valid"]:
                    counts["accepted"] += 1
                else:
                    wrong.append((case["keyword"], case["description"], written))
    assert wrong == []
    # What is refused cannot be wrong: most of what can be enforced is, and most of what is valid can be written.
    assert counts["compiled"] >= 160 and counts["accepted"] > 450 and counts["not accepted"] > 300


@pytest.mark.parametrize("keyword", NOT_ENFORCED)
def test_a_keyword_that_cannot_be_enforced_is_named(keyword: str, compiler: GrammarCompiler) -> None:
    named = 0
    for case in CASES:
        schema = case["schema"]
        if (
            case["keyword"] != keyword
            or not isinstance(schema, dict)
            or set(schema) - {"$schema", *NOT_ENFORCED[keyword]}
        ):
            continue
        try:
            compiled(compiler, schema)
        except InvalidRequest as error:
            assert any(name in str(error) for name in NOT_ENFORCED[keyword]) or "schema is false" in str(error)
            named += 1
    assert named
