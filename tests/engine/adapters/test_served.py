"""Whole engines with adapters: tokens against plain runs of PEFT's logits, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from llmjax.engine.core.request import EngineOutput, EngineRequest
from llmjax.errors import CheckpointError
from tests.checkpoints import ADAPTERS, GOLDEN

TOLERANCE = 2e-4
NAMES = ("plain", "other", "rslora")


def adaptation(name: str, scale: float = 1.0) -> Adaptation:
    reference = AdapterReference.read(name, ADAPTERS / name, number=1)
    return Adaptation.of([ScaledAdapter(reference=reference, scale=scale)])


class Said(NamedTuple):
    """What a request got."""

    tokens: list[int]
    logprobs: list[float]  # of the prompt's tokens but the first


class Asking:
    """Sends requests to an engine."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self._number = llm.engine, 10**6

    def ask(
        self, prompts: list[tuple[list[int], Adaptation | None]], *, tokens: int = 8, scored: bool = False
    ) -> list[Said]:
        """Computes requests together."""
        outputs: dict[int, list[EngineOutput]] = {}
        for prompt, own in prompts:
            self._number += 1
            outputs[self._number] = []
            params = SamplingParams(temperature=0, max_tokens=tokens, prompt_logprobs=0 if scored else None)
            self.engine.add(
                EngineRequest(
                    request_id=self._number,
                    prompt_token_ids=prompt,
                    params=params,
                    max_tokens=tokens,
                    stop_token_ids=frozenset(),
                    adaptation=own,
                )
            )
        while self.engine.num_requests:
            for output in self.engine.step():
                assert output.error is None, output.error
                outputs[output.request_id].append(output)
        return [_said(prompt, outputs[number]) for number, (prompt, _) in zip(outputs, prompts, strict=True)]


def _said(prompt: list[int], outputs: list[EngineOutput]) -> Said:
    scores = next((one.prompt_logprobs for one in outputs if one.prompt_logprobs), [None] * len(prompt))
    found = [score[token].logprob for token, score in zip(prompt, scores, strict=True) if score is not None]
    return Said([token for one in outputs for token in one.new_token_ids], found)


@pytest.fixture(scope="module")
def asking(compile_cache_dir: str) -> Iterator[Asking]:
    llm = LLM(
        str(GOLDEN / "llama"),
        skip_tokenizer_init=True,
        dtype="float32",
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=28 * 1536,  # less than two requests of 64 tokens
        compilation_cache_dir=compile_cache_dir,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    )
    yield Asking(llm)
    llm.engine.kv.check()
    assert llm.kv_stats().used == 0
    llm.close()


def golden(name: str) -> tuple[list[int], np.ndarray]:
    """The tokens of a golden adapter, and their log-probabilities but for the first."""
    with np.load(ADAPTERS / name / "golden.npz") as arrays:
        tokens, logits = arrays["tokens"].tolist(), arrays["logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return tokens, logprobs[np.arange(len(tokens) - 1), tokens[1:]]


def test_log_probabilities_of_a_mixed_batch(asking: Asking) -> None:
    """More adapters than slots: some wait, and slots get other adapters while requests run."""
    asked = [(golden(name)[0], adaptation(name)) for name in NAMES]
    found = asking.ask([*asked, (golden("plain")[0], None)], scored=True)
    for name, said in zip(NAMES, found, strict=False):
        np.testing.assert_allclose(said.logprobs, golden(name)[1], atol=TOLERANCE, rtol=0)
    (alone,) = asking.ask([(golden("plain")[0], None)], scored=True)
    np.testing.assert_allclose(found[-1].logprobs, alone.logprobs, atol=TOLERANCE, rtol=0)
    assert found[-1].tokens == alone.tokens


def test_tokens_do_not_depend_on_the_batch(asking: Asking) -> None:
    """Long requests that take each other's pages, with prefixes that are found again, each with its own adapter's."""
    prompt = golden("plain")[0]
    asked = [(prompt, adaptation("plain")), (prompt, None), (prompt[:9], adaptation("other")), (prompt, None)]
    alone = [asking.ask([one], tokens=24)[0].tokens for one in asked]
    assert alone[0] != alone[1] == alone[3]
    for _ in range(2):
        assert [said.tokens for said in asking.ask(asked, tokens=24)] == alone


def test_factors_and_sums(asking: Asking) -> None:
    """A factor of zero is the model as it is, and half of an adapter twice is the adapter."""
    tokens, expected = golden("plain")
    (nothing,) = asking.ask([(tokens, adaptation("plain", 0.0))], scored=True)
    (plain,) = asking.ask([(tokens, None)], scored=True)
    np.testing.assert_allclose(nothing.logprobs, plain.logprobs, atol=1e-6)
    half = adaptation("plain", 0.5).parts
    (whole,) = asking.ask([(tokens, Adaptation.of([*half, *half]))], scored=True)
    np.testing.assert_allclose(whole.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_what_does_not_fit_is_an_error_of_its_request(asking: Asking) -> None:
    runner = asking.engine.runner
    for name, message in (
        ("gpt2", "is not a matrix that the model only multiplies with"),
        ("saved", "has rank 32; max_lora_rank is 8"),
    ):
        with pytest.raises(CheckpointError, match=message):
            while not runner.can_load(adaptation(name), seconds=1):
                pass


def test_an_adapter_that_is_merged_at_load(compile_cache_dir: str) -> None:
    tokens, expected = golden("plain")
    llm = LLM(
        str(GOLDEN / "llama"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=1,
        max_num_batched_tokens=32,
        compilation_cache_dir=compile_cache_dir,
        lora_fused=str(ADAPTERS / "plain"),
    )
    (said,) = Asking(llm).ask([(tokens, None)], scored=True)
    np.testing.assert_allclose(said.logprobs, expected, atol=TOLERANCE, rtol=0)
    llm.close()
