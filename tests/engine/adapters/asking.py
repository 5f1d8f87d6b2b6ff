"""Asks an engine with adapters, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llmjax import LLM, SamplingParams
from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from llmjax.engine.core.request import EngineOutput, EngineRequest
from tests.checkpoints import ADAPTERS


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
        self,
        prompts: list[tuple[list[int], Adaptation | None]],
        *,
        tokens: int | Sequence[int] = 8,
        scored: bool = False,
    ) -> list[Said]:
        """Computes requests together; each makes its own number of ``tokens``, or all the same."""
        outputs: dict[int, list[EngineOutput]] = {}
        most = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        for (prompt, own), count in zip(prompts, most, strict=True):
            self._number += 1
            outputs[self._number] = []
            params = SamplingParams(temperature=0, max_tokens=count, prompt_logprobs=0 if scored else None)
            self.engine.add(
                EngineRequest(
                    request_id=self._number,
                    prompt_token_ids=prompt,
                    params=params,
                    max_tokens=count,
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


def golden(name: str) -> tuple[list[int], np.ndarray]:
    """The tokens of a golden adapter, and their log-probabilities but for the first."""
    with np.load(ADAPTERS / name / "golden.npz") as arrays:
        tokens, logits = arrays["tokens"].tolist(), arrays["logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return tokens, logprobs[np.arange(len(tokens) - 1), tokens[1:]]
