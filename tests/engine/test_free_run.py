"""Free runs, which sample tokens without masks: which tokens are kept, and how many are tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmjax import LLM, SamplingParams
from llmjax.engine.core.engine import Engine
from llmjax.engine.core.outputs import OutputProcessor
from llmjax.engine.core.pace import Pace
from llmjax.engine.core.request import Sequence
from llmjax.engine.core.scheduler import StepPlan
from llmjax.engine.free_run import FADING, LAUNCH, MASK, PRIORS, SUREST, FreeRun, Refusals, num_allowed
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
    """Walks along a grammar; tries at each place tokens that its mask allows and tokens that it does not."""
    vocab_size = llm.info.vocab_size
    compiled = llm._frontend.requests.checked(SamplingParams(structured_outputs=StructuredOutputsParams(**form)))
    assert compiled is not None and compiled.matcher is not None
    matcher = compiled.matcher.deep_copy()
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"logprobs": 1}, {"temperature": 0.0})),
        {"min_tokens": 5},
    ],
    ids=str,
)
def test_tokens_are_those_of_masks(options: dict[str, Any], llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, int]] = []
    ran = FreeRun.ran

    def noting(run: FreeRun, *, allowed: int, of: int) -> None:
        runs.append((allowed, of))
        ran(run, allowed=allowed, of=of)

    monkeypatch.setattr(FreeRun, "ran", noting)
    llm.warm_up()
    monkeypatch.setattr(Pace, "steps", 4)  # however slow the machine is
    # The first has masks alone, until a refusal is long ago.
    for prior in (2.0, 50.0, 1000.0):
        for wide in (True, False):
            monkeypatch.setitem(PRIORS, wide, (1e4 * prior, 1e4))  # so much that sequences change little of it
        monkeypatch.setattr(llm.engine, "_refusals", Refusals())
        freely = [generated(llm, form, **options) for form in FORMS]
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "_runs_freely", lambda *_: False)
            assert freely == [generated(llm, form, **options) for form in FORMS]
    assert any(allowed < of for allowed, of in runs) and any(allowed == of > 1 for allowed, of in runs)


def test_what_was_refused_is_in_no_page(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that continues an output is the same from cached pages and from none."""
    taken: list[int] = []
    take_back = OutputProcessor._take_back

    def noting(processor: OutputProcessor, sequence: Sequence, following: StepPlan | None) -> None:
        before = sequence.in_flight
        take_back(processor, sequence, following)
        taken.append(before - sequence.in_flight)

    monkeypatch.setattr(OutputProcessor, "_take_back", noting)
    for wide in (True, False):
        monkeypatch.setitem(PRIORS, wide, (1000.0, 1.0))
    monkeypatch.setattr(llm.engine, "_refusals", Refusals())
    llm.warm_up()
    monkeypatch.setattr(Pace, "steps", 4)
    written = [output for form in FORMS for output in generated(llm, form)]
    assert any(taken)
    llm.engine.kv.check()
    prompts = [PROMPT + output for output in written]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert any(output.num_cached_tokens > len(PROMPT) for output in found)
    llm.reset_prefix_cache()
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [a.outputs[0].token_ids for a in found] == [b.outputs[0].token_ids for b in again]


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"frequency_penalty": 1.0}], ids=str)
def test_what_looks_at_other_tokens_has_no_free_runs(
    options: dict[str, Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FreeRun, "ran", None)
    generated(llm, FORMS[0], **options)


def test_a_run_is_as_long_as_the_last_ones_were() -> None:
    run = FreeRun(Refusals())
    assert run.steps == 0  # the first token has a mask
    run.masked(0.9)
    assert run.steps == 1
    for _ in range(200):
        run.ran(allowed=4, of=4)
    longest = run.steps
    assert longest > 4
    run.ran(allowed=0, of=8)
    assert run.steps == 0  # the token after the refusal
    run.masked(0.9)
    assert run.steps < longest
    run.masked(0.1)
    assert run.steps == 0  # where little is allowed, it is another matter
    tried = []
    for _ in range(200):
        run.masked(0.1)
        tried.append(run.steps)
        if run.steps:
            run.ran(allowed=0, of=run.steps)
    assert 1 <= sum(count > 0 for count in tried) <= 8 and max(tried) == 1


def test_no_run_costs_more_than_masks() -> None:
    """The steps that are sampled in vain, by chance alone, and the dispatches that are saved."""
    for chance in (0.3, 0.1, 0.06, 0.03, 0.01, 0.003):
        met = Refusals()
        met.ran(wide=True, allowed=10**6, refused=False)
        for _ in range(2000):
            met.ran(wide=True, allowed=round(1 / chance), refused=True)
        run = FreeRun(met)
        run.masked(0.9)

        def cost(steps: int, chance: float = chance) -> float:
            return LAUNCH / steps + chance * (1.5 * steps + 0.5 + MASK)

        best = min(range(1, 64), key=cost)
        assert run.steps == 0 if cost(best) > MASK else abs(run.steps - best) <= 1, chance


def test_a_sequence_begins_with_what_others_have_met() -> None:
    met = Refusals()
    for _ in range(1000):
        first = FreeRun(met)
        first.masked(0.9)
        first.ran(allowed=8, of=8)
    second = FreeRun(met)
    second.masked(0.9)
    assert second.steps > 4
    # Which is bounded, so that a few refusals say that here it is different.
    assert second.steps**2 <= LAUNCH * SUREST / FADING
    for _ in range(12):
        second.ran(allowed=0, of=second.steps)
        second.masked(0.9)
    assert second.steps <= 1
    third = FreeRun(met)
    third.masked(0.1)
    assert third.steps == 0  # of narrow masks nothing has been learned
    refused = Refusals()
    for _ in range(200):
        refused.ran(wide=True, allowed=0, refused=True)
    assert FreeRun(refused).steps == 0
