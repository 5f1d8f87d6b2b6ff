"""Sampling parameters through the whole engine, against the plain model's logits edited in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from llmjax import LLM, SamplingParams

pytestmark = pytest.mark.smoke

EOS = 2
PROMPT = [20, 33, 47, 15, 90, 61, 8, 77, 40]
Edit = Callable[[np.ndarray, list[int]], None]  # changes logits f64 [V] given the output so far


@pytest.fixture
def llm(engine_of: Callable[..., LLM]) -> LLM:
    """Pages for less than two full contexts: many long requests at once preempt each other."""
    return engine_of("llama", text=True, kv_cache_memory_bytes=28 * 1536)


@pytest.fixture
def edited(plain: Callable[[str], Any]) -> Callable[..., list[int]]:
    """``edited(edit, prompt=PROMPT, count=…)``: greedy tokens of the plain model under an edit of its logits."""

    def run(edit: Edit, *, prompt: list[int] = PROMPT, count: int) -> list[int]:
        output: list[int] = []
        for _ in range(count):
            logits = plain("llama").logits(prompt + output)[-1].astype(np.float64)
            edit(logits, output)
            output.append(int(logits.argmax()))
        return output

    return run


def unedited(logits: np.ndarray, output: list[int]) -> None:
    pass


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **options})


def tokens_of(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def newest_of_many(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    """The same among requests that take its pages away."""
    rng = np.random.default_rng(0)
    others = [rng.integers(3, 96, 10).tolist() for _ in range(11)]
    *_, last = llm.generate([*others, prompt], [*[greedy(40, presence_penalty=0.5)] * 11, params], use_tqdm=False)
    assert last.metrics is not None
    assert last.metrics.num_preemptions > 0
    return last.outputs[0].token_ids


@pytest.mark.parametrize("generate", [tokens_of, newest_of_many])
def test_penalties(llm: LLM, edited: Callable[..., list[int]], generate: Callable[..., list[int]]) -> None:
    def edit(logits: np.ndarray, output: list[int]) -> None:
        seen = sorted({*PROMPT, *output})
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.4, logits[seen] * 1.4)
        for token in set(output):
            logits[token] -= 0.3 * output.count(token) + 0.6

    params = greedy(40, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.6)
    expected = edited(edit, count=40)
    assert expected != edited(unedited, count=40)
    assert generate(llm, params) == expected


@pytest.mark.parametrize("generate", [tokens_of, newest_of_many])
def test_min_tokens_forbid_stops_and_then_allow_them(
    llm: LLM, edited: Callable[..., list[int]], generate: Callable[..., list[int]]
) -> None:
    stops = edited(unedited, count=6)

    def edit(logits: np.ndarray, output: list[int]) -> None:
        if len(output) < 25:
            logits[[*stops, EOS]] = -np.inf

    expected = edited(edit, count=40)
    end = next((i for i, token in enumerate(expected) if token in (*stops, EOS)), 39)
    assert end >= 25
    params = greedy(40, min_tokens=25, stop_token_ids=stops, ignore_eos=False)
    assert generate(llm, params) == expected[: end + 1]


def test_min_tokens_end_exactly_then(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, greedy(20, min_tokens=7, logit_bias={EOS: 100}, ignore_eos=False), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert EOS not in output.outputs[0].token_ids[:7]
    assert output.outputs[0].token_ids[7] == EOS


@pytest.mark.parametrize("generate", [tokens_of, newest_of_many])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_bad_words(llm: LLM, edited: Callable[..., list[int]], generate: Callable[..., list[int]], length: int) -> None:
    banned: list[list[int]] = []

    def edit(logits: np.ndarray, output: list[int]) -> None:
        history = PROMPT + output
        for word in banned:
            if history[len(history) - len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = -np.inf

    # Forbids what would be said next, several times over; the first word begins in the prompt where it can.
    for at in (0, 4, 4, 9, 15):
        text = PROMPT + edited(edit, count=at + 1)
        banned.append(text[len(text) - length :])
    expected = edited(edit, count=30)
    assert expected != edited(unedited, count=30)
    assert llm.tokenizer is not None
    # The text of each word, which the engine also forbids after a space: no difference here, as no space is said.
    words = [llm.tokenizer.decode(word) for word in banned]
    space = llm.tokenizer.encode(" ", add_special_tokens=False)
    assert all(space[0] not in part for part in (expected, *banned))
    assert generate(llm, greedy(30, bad_words=words)) == expected


def test_a_bad_word_of_an_earlier_request_in_the_slot_means_nothing(llm: LLM, edited: Callable[..., list[int]]) -> None:
    first, second = edited(unedited, count=2)
    assert llm.tokenizer is not None
    for previous in range(3, 96):
        # The slot's last token is ``previous``; it precedes ``first`` in the bad word but not in this request.
        tokens_of(llm, greedy(1, allowed_token_ids=[previous]))
        if previous not in (PROMPT[-1], first):
            word = llm.tokenizer.decode([previous, first])
            assert tokens_of(llm, greedy(2, bad_words=[word])) == [first, second]


def test_logit_bias(llm: LLM, edited: Callable[..., list[int]]) -> None:
    first = edited(unedited, count=1)[0]

    def edit(logits: np.ndarray, output: list[int]) -> None:
        logits[first] -= 100
        logits[50] += 2.5

    assert tokens_of(llm, greedy(20, logit_bias={first: -100, 50: 2.5})) == edited(edit, count=20)


def test_allowed_token_ids(llm: LLM, edited: Callable[..., list[int]]) -> None:
    allowed = [5, 9, 60, 95]

    def edit(logits: np.ndarray, output: list[int]) -> None:
        logits[np.setdiff1d(np.arange(96), allowed)] = -np.inf

    assert tokens_of(llm, greedy(20, allowed_token_ids=allowed)) == edited(edit, count=20)
    sampled = tokens_of(llm, SamplingParams(seed=0, temperature=5, max_tokens=50, allowed_token_ids=allowed))
    assert set(sampled) == set(allowed)


def test_top_k_of_one_is_greedy(llm: LLM, edited: Callable[..., list[int]]) -> None:
    params = SamplingParams(temperature=3, top_k=1, max_tokens=20, ignore_eos=True)
    assert tokens_of(llm, params) == edited(unedited, count=20)


def test_end_of_sequence(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, greedy(5, logit_bias={EOS: 100}, ignore_eos=False), use_tqdm=False)
    (ended,) = output.outputs
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([EOS], "", "stop", None)
    (output,) = llm.generate(PROMPT, greedy(5, logit_bias={EOS: 100}), use_tqdm=False)
    (ended,) = output.outputs
    assert (ended.token_ids, ended.finish_reason) == ([EOS] * 5, "length")


def test_stop_token_ids(llm: LLM, edited: Callable[..., list[int]]) -> None:
    expected = edited(unedited, count=10)
    stop = expected[5]
    end = expected.index(stop)
    assert llm.tokenizer is not None
    for include in (False, True):
        params = greedy(10, stop_token_ids=[stop, 3], include_stop_str_in_output=include)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        (ended,) = output.outputs
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (expected[: end + 1], "stop", stop)
        assert ended.text == llm.tokenizer.decode(expected[: end + include])


@pytest.mark.parametrize("length", [1, 3])
def test_stop_strings(llm: LLM, edited: Callable[..., list[int]], length: int) -> None:
    expected = edited(unedited, count=30)
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(expected)
    stop = text[10 : 10 + length]
    at = text.index(stop)
    for include in (False, True):
        params = greedy(30, stop=[stop, "`~"], include_stop_str_in_output=include)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        (ended,) = output.outputs
        assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
        assert ended.text == text[: at + length * include]
        assert ended.token_ids == expected[: at + length]
    (output,) = llm.generate(PROMPT, greedy(30, stop=["`~"]), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "length")


def test_logprobs_counts(llm: LLM, plain: Callable[[str], Any]) -> None:
    params = [SamplingParams(seed=1, temperature=2, max_tokens=6, logprobs=top, ignore_eos=True) for top in (0, 1, 7)]
    outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    for top, output in zip((0, 1, 7), outputs, strict=True):
        (said,) = output.outputs
        rows = plain("llama").logprobs(PROMPT + said.token_ids)[len(PROMPT) - 1 :]
        assert said.logprobs is not None
        assert len(said.logprobs) == 6
        for token, entry, row in zip(said.token_ids, said.logprobs, rows, strict=False):
            assert set(entry) == {token, *np.argsort(-row)[:top].tolist()}
            assert entry[token].logprob == pytest.approx(row[token], abs=1e-4)
            assert entry[token].rank == 1 + (row > row[token]).sum()
        total = sum(entry[token].logprob for token, entry in zip(said.token_ids, said.logprobs, strict=True))
        assert said.cumulative_logprob == pytest.approx(total)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


@pytest.mark.parametrize(("length", "asked", "got"), [(60, None, 4), (60, 100, 4), (60, 3, 3), (63, None, 1)])
def test_output_ends_with_the_context(
    llm: LLM, edited: Callable[..., list[int]], length: int, asked: int | None, got: int
) -> None:
    prompt: list[int] = np.random.default_rng(length).integers(3, 96, length).tolist()
    (output,) = llm.generate(prompt, greedy(1).clone(max_tokens=asked), use_tqdm=False)
    assert output.outputs[0].token_ids == edited(unedited, prompt=prompt, count=got)
    assert output.outputs[0].finish_reason == "length"


def seeded(seed: int, **options: Any) -> SamplingParams:
    values = {"temperature": 1.5, "top_p": 0.95, "max_tokens": 40, "ignore_eos": True, **options}
    return SamplingParams(seed=seed, **values)


def test_seed_alone_among_others_after_preemption_and_forked(llm: LLM) -> None:
    reference = [tokens_of(llm, seeded(7 + i)) for i in range(3)]
    assert len({tuple(tokens) for tokens in reference}) == 3
    rng = np.random.default_rng(3)
    others: list[Sequence[int]] = [rng.integers(3, 96, rng.integers(1, 30)).tolist() for _ in range(16)]
    params = [seeded(100 + i, top_k=i) for i in range(16)]
    outputs = llm.generate([*others, PROMPT], [*params, seeded(7)], use_tqdm=False)
    last = outputs[-1]
    assert last.metrics is not None
    assert last.metrics.num_preemptions > 0
    assert last.outputs[0].token_ids == reference[0]
    first, *_ = llm.generate([PROMPT, *others], [seeded(7), *params], use_tqdm=False)
    assert first.outputs[0].token_ids == reference[0]
    (forked,) = llm.generate(PROMPT, seeded(7, n=3), use_tqdm=False)
    assert [output.token_ids for output in forked.outputs] == reference
    assert [output.index for output in forked.outputs] == [0, 1, 2]


def test_without_a_seed_requests_differ(llm: LLM) -> None:
    params = seeded(0).clone(seed=None)
    outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3
