"""The constraint of a sequence: a grammar, a budget of reasoning tokens, and both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher

from llmjax.constraints.compiler import GrammarCompiler
from llmjax.constraints.thinking import ThinkingBudget, TokenMark
from llmjax.engine.constraint import UNBOUNDED, Constraint
from llmjax.engine.free_run import FreeRun, Refusals
from llmjax.sampling.masks import bit_masks
from llmjax.sampling.structured import FreeText, StructuredOutputsParams
from tests.constraints.test_schema_suite import Bytes


class Plain(Bytes):
    """A vocabulary of bytes, of which none is special."""

    def special_ids_in(self, markers: list[str]) -> frozenset[int]:
        return frozenset()


TOKENS = Bytes().bytes_of_all(257)
BUDGET = ThinkingBudget(
    tokens=3,
    inside=True,
    start=TokenMark.of("<t>", TOKENS),
    end=TokenMark.of("</t>", TOKENS),
    closing=tuple(b"</t>"),
)


def matcher(regex: str, after: FreeText | None = None) -> LLMatcher:
    compiler = GrammarCompiler(Plain(), vocab_size=257, eos_token_ids=[256])  # type: ignore[arg-type]
    return compiler.matcher(compiler.grammar(StructuredOutputsParams(regex=regex, after=after)))


def accepted(constraint: Constraint, text: bytes) -> bool:
    return all(constraint.accept(token) for token in text)


def put_down(constraint: Constraint) -> bytes:
    """The forced tokens, each accepted before the next one is asked for."""
    found = b""
    for token in constraint.forced():
        found += bytes([token])
        assert constraint.accept(token)
    return found


def allowed(constraint: Constraint) -> bytes:
    (mask,) = bit_masks({0: constraint}, rows=1, vocab_size=257)
    return bytes(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:256]).tolist())


def test_a_grammar_says_what_comes() -> None:
    constraint = Constraint(matcher("(ab)*c"), jumps=True)
    assert constraint.needs_mask and constraint.masks and not constraint.runs and allowed(constraint) == b"ac"
    assert accepted(constraint, b"a") and put_down(constraint) == b"b"
    assert not constraint.stopped and accepted(constraint, b"c") and constraint.stopped
    assert constraint.error is None and not constraint.over


def test_what_is_not_allowed_is_an_error_that_names_the_field() -> None:
    constraint = Constraint(matcher("(ab)*c"), jumps=True)
    assert not constraint.accept(ord("b"))
    assert constraint.error is not None and constraint.error.field == "structured_outputs"
    assert "nothing that the grammar allows" in str(constraint.error)


def test_nothing_is_left_of_tokens_that_were_refused() -> None:
    met = Refusals()
    met.ran(wide=True, allowed=10**6, refused=False)
    constraint = Constraint(matcher("[ab]*c"), jumps=True, free_run=FreeRun(met))
    (mask,) = bit_masks({}, rows=1, vocab_size=256)
    constraint.masked(mask, vocab_size=256)
    assert not constraint.needs_mask and constraint.steps(0) > 4
    assert constraint.rewind(tuple(b"abab")) == 4 and not constraint.rewound
    assert constraint.rewind(tuple(b"abxb")) == 2 and constraint.rewound
    assert constraint.needs_mask and accepted(constraint, b"ab") and allowed(constraint) == b"abc"


def test_reasoning_is_closed_at_its_budget_and_then_nothing_is_asked_for() -> None:
    constraint = Constraint(None, budget=BUDGET, jumps=True)
    assert not constraint.masks and not constraint.needs_mask
    assert (constraint.steps(0), constraint.steps(2), constraint.steps(3)) == (3, 1, 0)
    assert accepted(constraint, b"ab") and put_down(constraint) == b"" and constraint.steps(1) == 0
    assert accepted(constraint, b"c") and not constraint.over
    assert put_down(constraint) == b"</t>" and constraint.over and constraint.steps(0) == UNBOUNDED


@pytest.mark.parametrize("text", [b"a</t>b", b"</t><t"])
def test_what_does_not_reason_at_the_budget_goes_on(text: bytes) -> None:
    constraint = Constraint(None, budget=replace(BUDGET, tokens=len(text)), jumps=True)
    assert accepted(constraint, text[:-1]) and not constraint.over
    assert accepted(constraint, text[-1:]) and constraint.over and put_down(constraint) == b""


def test_no_budget_at_all_closes_before_the_first_token() -> None:
    constraint = Constraint(None, budget=replace(BUDGET, tokens=0), jumps=True)
    assert constraint.begins and constraint.steps(0) == 1 and constraint.steps(1) == 0
    assert put_down(constraint) == b"</t>" and constraint.over and not constraint.begins
    opened = Constraint(None, budget=replace(BUDGET, tokens=0, inside=False), jumps=True)
    assert opened.over


def test_an_end_that_is_sampled_is_sampled_under_masks() -> None:
    constraint = Constraint(None, budget=BUDGET, jumps=False)
    assert constraint.masks and not constraint.needs_mask and len(allowed(constraint)) == 256
    assert accepted(constraint, b"abc") and not constraint.begins
    for token in b"</t>":
        assert constraint.needs_mask and allowed(constraint) == bytes([token])
        assert constraint.accept(token)
    assert constraint.over and not constraint.needs_mask and constraint.error is None
    refused = Constraint(None, budget=replace(BUDGET, tokens=0), jumps=False)
    assert not refused.accept(ord("x"))
    assert refused.error is not None and refused.error.field == "thinking_token_budget"


@pytest.mark.parametrize("jumps", [True, False])
def test_a_grammar_after_reasoning_reads_the_end_that_was_forced(jumps: bool) -> None:
    form = matcher("yes|no", FreeText(opening="", closing="</t>"))
    constraint = Constraint(form, budget=BUDGET, jumps=jumps)
    assert accepted(constraint, b"abc")
    if jumps:
        assert put_down(constraint) == b"</t>"
    else:
        assert accepted(constraint, b"</t>")
    assert not constraint.over and constraint.needs_mask
    assert set(allowed(constraint)) >= {*b"yn"} and ord("q") not in allowed(constraint)
    assert accepted(constraint, b"y") and put_down(constraint) == b"es" and constraint.stopped
