"""Layers that read the keys and values of other layers, in an engine."""

from __future__ import annotations

from typing import Any

from llmjax.sampling.params import SamplingParams

PROMPT = [5, 17, 42, 8, 90, 33, 21, 64, 11, 3, 77, 50, 29, 6, 71, 18, 44, 2, 9]


def test_tokens_are_those_of_the_plain_model(engine_of: Any, plain: Any) -> None:
    """In chunks, in decodes, and from the prefix cache."""
    llm, params = engine_of("gemma4"), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = plain("gemma4").greedy(PROMPT, 12)
    for _ in range(2):
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
        assert list(output.outputs[0].token_ids) == expected
