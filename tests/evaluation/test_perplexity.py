"""Perplexities of a text, compared with Hugging Face's models; the figures are made by golden/make_perplexity.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax import LLM
from llmjax.errors import ConfigError
from llmjax.evaluation.perplexity import Perplexity, Windowing, score_windows, text_tokens
from llmjax.sampling.params import SamplingParams
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parents[1]
RESULTS = json.loads((Path(__file__).parent / "golden" / "perplexity.json").read_text())
CHARACTERS = TESTS / "engine" / "golden" / "characters"


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def llm(request: pytest.FixtureRequest, compile_cache_dir: str) -> Iterator[LLM]:
    llm = LLM(
        str(GOLDEN / request.param),
        tokenizer=str(CHARACTERS),
        dtype="float32",
        page_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=2**20,
        max_logprobs=0,
        served_model_name=request.param,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
    )
    yield llm
    llm.close()


def test_perplexities_equal_hugging_faces(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids, bos = text_tokens(llm.tokenizer, RESULTS["text"])
    assert (len(ids), bos) == (len(RESULTS["text"]), 1)
    for expected in RESULTS["perplexity"][llm.model_name]:
        windows = Windowing(context=expected["context"], stride=expected["stride"]).cut(ids, bos=bos)
        result = Perplexity()
        for logprobs in score_windows(llm.client, windows):
            result.add(logprobs)
        assert (result.num_tokens, result.num_windows) == (expected["tokens"], len(windows))
        assert result.value == pytest.approx(expected["perplexity"], rel=1e-5)
        if "standard_error" in expected:
            assert result.standard_error == pytest.approx(expected["standard_error"], rel=1e-5)
    assert llm.engine.idle
    assert llm.kv_stats().used == 0


def test_a_window_may_be_as_long_as_the_context_and_no_longer(llm: LLM) -> None:
    longest = llm.max_model_len
    ids = list(range(3, 3 + 30)) * 4
    (window,) = Windowing(context=longest).cut(ids[:longest], bos=None)
    (logprobs,) = score_windows(llm.client, [window])
    shorter = llm.generate([window.token_ids[:-1]], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    entries = shorter[0].prompt_logprobs or []
    known = [
        entry[token].logprob
        for token, entry in zip(window.token_ids[window.first_scored : -1], entries[window.first_scored :], strict=True)
        if entry
    ]
    np.testing.assert_allclose(logprobs[:-1], known, rtol=1e-5)
    with pytest.raises(ConfigError, match=f"windows of {longest + 1} tokens do not fit this model's context of"):
        next(score_windows(llm.client, Windowing(context=longest + 1).cut(ids, bos=None)))


def test_windows_that_nobody_waits_for_leave_the_engine(llm: LLM) -> None:
    scores = score_windows(llm.client, Windowing(context=16).cut(list(range(3, 90)), bos=None))
    next(scores)
    scores.close()
    while not llm.engine.idle:
        llm.engine.step()
    assert llm.kv_stats().used == 0


IDS = st.integers(2, 60).map(lambda count: list(range(10, 10 + count)))  # all different, so that places are known


@given(ids=IDS, context=st.integers(2, 20), bos=st.none() | st.just(1), data=st.data())
def test_strided_windows_score_every_token_once_after_all_the_text_that_fits(
    ids: list[int], context: int, bos: int | None, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    text = [bos, *ids] if bos is not None else ids
    scored: set[int] = set()
    for window in Windowing(context=context, stride=stride).cut(ids, bos=bos):
        start = text.index(window.token_ids[0])
        assert start % stride == 0
        assert window.token_ids == text[start : start + context]
        new = set(range(start + window.first_scored, start + len(window.token_ids)))
        assert not new & scored
        assert window.first_scored == 1 or start + window.first_scored - 1 in scored  # what came before was new then
        scored |= new
    unscored = {0} if stride < context else set(range(0, len(text), stride))
    assert scored == set(range(len(text))) - unscored


@given(ids=IDS, context=st.integers(3, 20), bos=st.none() | st.just(1))
def test_halves_score_the_second_half_of_whole_windows(ids: list[int], context: int, bos: int | None) -> None:
    text = [bos, *ids] if bos is not None else ids
    windowing = Windowing(context=context)
    if len(text) < context:
        with pytest.raises(ConfigError, match=f"the text has {len(text)} tokens, which fill no window of {context}"):
            windowing.cut(ids, bos=bos)
        return
    windows = windowing.cut(ids, bos=bos)
    assert len(windows) == len(text) // context
    for i, window in enumerate(windows):
        assert window.token_ids[1:] == text[i * context + 1 : (i + 1) * context]
        assert window.token_ids[0] == (bos or text[i * context])
        assert window.num_scored == context - context // 2 - 1


def test_only_the_first_tokens_are_used() -> None:
    (window,) = Windowing(context=8, stride=8, max_tokens=5).cut(range(10, 20), bos=1)
    assert window.token_ids == [1, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"context": 2}, "context must be at least 3, not 2"),
        ({"context": 1, "stride": 1}, "context must be at least 2, not 1"),
        ({"context": 8, "stride": 9}, r"stride must lie in \[1, 8\] \(the context\), not 9"),
        ({"stride": 0}, r"stride must lie in \[1, 512\]"),
        ({"max_tokens": 1}, "max_tokens must be at least 2, not 1"),
    ],
)
def test_impossible_windows_are_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Windowing(**numbers)


@given(st.lists(st.floats(-30, 0), min_size=2, max_size=40), st.integers(1, 39))
def test_sums_are_those_of_all_tokens(values: list[float], at: int) -> None:
    result = Perplexity()
    for part in (values[:at], values[at:]):
        result.add(np.array(part))
    nll = -np.array(values)
    assert result.mean_nll == pytest.approx(nll.mean(), abs=1e-12)
    assert result.value == pytest.approx(math.exp(nll.mean()))
    error = math.exp(nll.mean()) * nll.std() / math.sqrt(len(nll) - 1)
    assert result.standard_error == pytest.approx(error, rel=1e-6, abs=1e-6 * result.value)
