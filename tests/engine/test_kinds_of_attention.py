"""Layers that read the keys and values of other layers, and layers that see chunks of a sequence, in an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmjax.sampling.params import SamplingParams
from tests.checkpoints import GOLDEN


def generated(llm: Any, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v32-sparse",
        pytest.param("gemma3n", marks=pytest.mark.slow),
        "gemma4",
        pytest.param("llama4-long", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_most_likely_ones(name: str, engine_of: Any) -> None:
    """Compared with Hugging Face's model, after prompts in several steps and from the prefix cache. Decodes continue as
    prompts of the same tokens would."""
    with np.load(GOLDEN / name / "golden.npz") as case:
        tokens, logits = case["long/tokens"].tolist(), case["long/logits"]
    llm = engine_of(name, max_num_seqs=1)  # one sequence at a time, so two programs
    for length in (40, 27, 9):
        assert generated(llm, tokens[:length], 1) == [logits[length - 1].argmax()]
    made = generated(llm, tokens[:21], 9)
    assert made[0] == logits[20].argmax()
    for count in (3, 8):
        assert generated(llm, tokens[:21] + made[:count], 1) == [made[count]]
