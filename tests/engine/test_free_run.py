"""Tokens that are sampled without masks: which of them hold, and how many are tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmjax import LLM, SamplingParams
from llmjax.engine.engine import Engine
from llmjax.engine.free_run import LEAST, PRIORS, FreeRun, num_allowed
from llmjax.engine.pace import Pace
from llmjax.sampling.masks import bit_masks
from llmjax.sampling.structured import StructuredOutputsParams
from tests.engine.schemas import SCHEMAS

PROMPT = [20, 33, 47, 15, 90, 61, 8, 77, 40]
FORMS: list[dict[str, Any]] = [
    {"regex": r"[a-f ]*[.]"},
    {"regex": "(the first of them|another one), [0-9] and no more than that"},
    {"choice": ["yes", "no", "no way"]},
    {"regex": r"(?s:.*)\x01"},  # everything, and no end
    *({"json": schema} for schema in SCHEMAS[:6]),
    {"json": SCHEMAS[0], "disable_any_whitespace": True},
]


@pytest.fixture
def llm(engine_of: Callable[..., LLM]) -> LLM:
    return engine_of("llama", text=True, kv_cache_memory_bytes=28 * 1536)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(form=st.sampled_from(FORMS), draw=st.randoms(use_true_random=False))
def test_what_holds_is_what_masks_let_through(form: dict[str, Any], draw: Any, llm: LLM) -> None:
    """A walk along a grammar: at each place, tokens that its mask has and tokens that it has not."""
    vocab_size = llm.info.vocab_size
    constraint = llm._frontend.constraint(SamplingParams(structured_outputs=StructuredOutputsParams(**form)))
    assert constraint is not None
    matcher = constraint.matcher.deep_copy()
    walked: list[int] = []
    first = matcher.deep_copy()
    for _ in range(24):
        if matcher.is_stopped():
            break
        mask = bit_masks({0: matcher}, rows=1, vocab_size=vocab_size)[0]
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
        for token in [draw.randrange(vocab_size) for _ in range(8)]:
            assert num_allowed(matcher, [token]) == bits[token], (form, walked, token)
        token = draw.choice(np.flatnonzero(bits).tolist())
        assert num_allowed(matcher, [token]) == 1
        walked.append(token)
        assert matcher.consume_token(token)
    assert num_allowed(first, walked) == len(walked)
    assert num_allowed(first, walked) == len(walked)  # it stays as it is


def generated(llm: LLM, form: dict[str, Any], **options: Any) -> list[list[int]]:
    demanded = StructuredOutputsParams(**form)
    params = [
        SamplingParams(max_tokens=40, seed=seed, structured_outputs=demanded, **{"temperature": 1.0, **options})
        for seed in range(4)
    ]
    free = SamplingParams(max_tokens=40, seed=9, temperature=1.0, ignore_eos=True)
    outputs = llm.generate([PROMPT] * 5, [*params, free], use_tqdm=False)
    assert [output.error for output in outputs] == [None] * 5
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"temperature": 0.0}, {"min_tokens": 5}], ids=str)
def test_tokens_are_those_of_masks(options: dict[str, Any], llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, int]] = []
    ran = FreeRun.ran

    def noting(run: FreeRun, *, allowed: int, of: int) -> None:
        runs.append((allowed, of))
        ran(run, allowed=allowed, of=of)

    monkeypatch.setattr(FreeRun, "ran", noting)
    llm.warm_up()
    monkeypatch.setattr(Pace, "steps", 4)  # however slow the machine is
    for prior in (2.0, 50.0):  # the second has runs tried that are sure to fail
        monkeypatch.setitem(PRIORS, False, (prior, 1.0))
        monkeypatch.setitem(PRIORS, True, (prior, 1.0))
        freely = [generated(llm, form, **options) for form in FORMS]
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "_runs_freely", lambda *_: False)
            assert freely == [generated(llm, form, **options) for form in FORMS]
    assert any(allowed < of for allowed, of in runs) and any(allowed == of > 1 for allowed, of in runs)


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"frequency_penalty": 1.0}], ids=str)
def test_what_looks_at_other_tokens_has_no_free_runs(
    options: dict[str, Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FreeRun, "ran", None)
    generated(llm, FORMS[0], **options)


def test_a_run_is_as_long_as_the_last_ones_were() -> None:
    run = FreeRun()
    assert run.steps == 0  # the first token has a mask
    run.masked(0.9)
    assert run.steps == 8
    run.ran(allowed=8, of=8)
    assert run.steps > 8
    run.ran(allowed=0, of=8)
    assert run.steps == 0  # the token behind the refusal
    run.masked(0.1)
    assert run.steps == 2  # where little is allowed, it is another matter
    run.ran(allowed=0, of=2)
    tried = []
    for _ in range(40):
        run.masked(0.1)
        tried.append(run.steps)
        if run.steps:
            run.ran(allowed=0, of=run.steps)
    assert 1 <= sum(count > 0 for count in tried) <= 8 and max(tried) == LEAST
