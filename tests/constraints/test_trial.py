"""Trials of grammars: bounded, remembered, and never in the way of others."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from llmjax.constraints.compiler import GrammarCompiler
from llmjax.constraints.grammars import grammar_of
from llmjax.constraints.matchers import Vocabulary
from llmjax.constraints.trial import GrammarProcessError, GrammarRefused, GrammarTrial, TrialLimits
from llmjax.errors import InvalidRequest, QueueFull
from llmjax.sampling.structured import StructuredOutputsParams
from llmjax.turns import Turn, TurnLimits, Turns
from tests.constraints.test_schema_suite import Bytes

EOS = 256
SECONDS = 60.0  # of a busy machine
HOURS = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(1, 64)]}  # 3,500 characters


def trial(kind: type[GrammarTrial] = GrammarTrial, **limits: Any) -> GrammarTrial:
    tokens = [bytes([i]) for i in range(256)] + [b""]
    return kind(lambda: Vocabulary(tokens=tokens, special=[EOS], eos=[EOS]), limits=TrialLimits(**limits))


def compiler_of(trial: GrammarTrial) -> GrammarCompiler:
    compiler = GrammarCompiler(Bytes(), vocab_size=EOS + 1, eos_token_ids=[EOS])  # type: ignore[arg-type]
    compiler._trial = trial
    return compiler


def grammar(**form: Any) -> str:
    return grammar_of(StructuredOutputsParams(**form), special=lambda marker: [marker])


def test_one_process_tries_all_and_keeps_nothing() -> None:
    tried = trial(cpu_seconds=1.5, wall_seconds=3600)
    assert tried.error(grammar(regex="a+")) == ""
    (process,) = tried._idle
    with pytest.raises(GrammarRefused, match=r"1\.5 s of computing time"):
        tried.error(grammar(json=HOURS))
    assert tried.error(grammar(choice=[f"choice {i}" for i in range(1024)])) == ""
    assert "unclosed" in tried.error(grammar(regex="[a"))
    assert tried._idle == [process]


def test_a_late_answer_is_not_waited_for() -> None:
    tried = trial(cpu_seconds=30, wall_seconds=0.1, short_seconds=0.1)
    with pytest.raises(InvalidRequest, match=r"more than 0\.1 s") as raised:
        tried.error(grammar(json=HOURS))
    assert not isinstance(raised.value, GrammarRefused)  # on a machine that is less busy it may do
    (process,) = tried._idle
    tried._limits = TrialLimits()
    process._limits = TrialLimits()
    assert tried.error(grammar(regex="a+")) == "" and tried._idle == [process]


def test_a_process_that_is_gone_is_an_error_and_another_one_starts() -> None:
    tried = trial()
    assert tried.error(grammar(regex="a+")) == ""
    (process,) = tried._idle
    process._process.exit_code()
    assert tried.error(grammar(regex="a+")) == ""  # found dead before it was asked
    (process,) = tried._idle
    turn: Any = SimpleNamespace(takes_long=process._process.exit_code)  # killed while it tries
    with pytest.raises(GrammarProcessError, match="exit status -9"):
        tried.error(grammar(json=HOURS), turn=turn)
    assert tried._idle == []


class Recorded(GrammarTrial):
    """Knows which process was asked each time, and that what is not endless does not take long, even on a machine that
    takes its time for everything."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.used: list[Any] = []
        self.asked = threading.Semaphore(0)

    def _process(self) -> Any:
        process = super()._process()
        self.used.append(process)
        self.asked.release()
        return process

    def error(self, grammar: str, *, turn: Turn | None = None) -> str:
        return super().error(grammar, turn=turn if "{63}" in grammar else None)


def test_many_that_take_long_do_not_hold_up_others() -> None:
    """They are refused soon but for one of each client, and who asks for something quick gets it meanwhile."""
    compiler = compiler_of(trial(Recorded, cpu_seconds=60.0))
    turns = Turns("forms of answers", limits=TurnLimits(short=1, postponed=1))

    def submit(client: str, text: str) -> Any:
        return turns.submit(client, lambda turn: compiler.check(text, turn=turn))

    slow = [submit("a", grammar(json={**HOURS, "minLength": number})) for number in range(3)]
    with pytest.raises(QueueFull):
        slow[2].result(SECONDS)
    assert submit("a", grammar(regex="a+")).result(SECONDS) is None
    assert not slow[0].done() and not slow[1].done()
    first: Any = compiler._trial
    for _ in range(4):
        assert first.asked.acquire(timeout=SECONDS)
    first.used[0]._process.kill()
    with pytest.raises(GrammarProcessError):
        slow[0].result(SECONDS)
    assert first.asked.acquire(timeout=SECONDS)  # its place is the other one's
    first.used[-1]._process.kill()
    with pytest.raises(GrammarProcessError):
        slow[1].result(SECONDS)


def test_refusals_are_remembered() -> None:
    compiler = compiler_of(trial(cpu_seconds=0.2))
    for form in ({"json": HOURS}, {"regex": "[a"}):
        text = compiler.grammar(StructuredOutputsParams(**form))
        with pytest.raises(InvalidRequest) as first:
            compiler.check(text, field="tools")
        with pytest.raises(InvalidRequest) as again:
            compiler.known(text, field="response_format")
        assert str(again.value) == str(first.value).replace("tools", "response_format")
        assert again.value.field == "response_format"
