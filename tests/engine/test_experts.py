"""Mixtures of experts with quantized stacks in an engine, compared with plain runs of the dequantized weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.kernels.qtensor import QTensor


@pytest.mark.slow
def test_quantized_stacks(engine_of: Callable[..., LLM], plain: Callable[[str], Any]) -> None:
    name = "mixtral"
    llm = engine_of(name, quantization="int8", activations="float", max_num_seqs=2)
    params = llm.engine.model.params
    stacks = [key for key, weight in params.items() if ".experts." in key and isinstance(weight, QTensor)]
    assert len(stacks) == 9
    routers = [weight for key, weight in params.items() if key.endswith("mlp.gate.weight")]
    assert routers and all(isinstance(router, jax.Array) and router.dtype == np.float32 for router in routers)
    dequantized = copy.copy(plain(name))
    dequantized.params = {
        key: weight.dequantize() if isinstance(weight, QTensor) else weight for key, weight in params.items()
    }
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 96, count).tolist() for count in (30, 1, 17)]
    settings = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [dequantized.greedy(prompt, 12) for prompt in prompts]
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
