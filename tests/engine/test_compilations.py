"""After the warm-up nothing compiles, whatever requests ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from llmjax import LLM, SamplingParams

NUM_REQUESTS = 500


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any mix of features; each one is off more often than on."""

    def maybe(value: Any, off: Any, share: float = 0.25) -> Any:
        return value if rng.random() < share else off

    max_tokens = int(rng.integers(1, 9))
    return SamplingParams(
        n=maybe(int(rng.integers(2, 4)), 1, 0.1),
        temperature=float(rng.choice([0, 0.7, 2])),
        top_p=maybe(0.8, 1.0),
        top_k=maybe(int(rng.integers(1, 20)), 0),
        min_p=maybe(0.05, 0.0),
        presence_penalty=maybe(0.5, 0.0),
        frequency_penalty=maybe(-0.5, 0.0),
        repetition_penalty=maybe(1.2, 1.0),
        seed=maybe(5, None),
        max_tokens=max_tokens,
        min_tokens=maybe(int(rng.integers(0, max_tokens)), 0),
        stop=maybe(["ab", "c"], []),
        stop_token_ids=maybe([9, 30], []),
        ignore_eos=bool(rng.random() < 0.5),
        logprobs=maybe(int(rng.integers(0, 6)), None),
        prompt_logprobs=maybe(int(rng.integers(0, 6)), None, 0.1),
        logit_bias=maybe({7: 3.0, 50: -100.0}, None),
        allowed_token_ids=maybe(list(range(5, 60)), None, 0.1),
        bad_words=maybe(["a", "bc", "def"], []),
    )


def test_nothing_compiles_after_the_warm_up(engine_of: Callable[..., LLM]) -> None:
    llm = engine_of("llama", text=True, max_num_seqs=16, max_num_batched_tokens=32, kv_cache_memory_bytes=50 * 1536)
    llm.warm_up()
    rng = np.random.default_rng(11)
    lengths = rng.choice([1, 2, 3, 9, 17, 33, 50], NUM_REQUESTS)
    prompts = [rng.integers(3, 96, length).tolist() for length in lengths]
    params = [random_params(rng) for _ in prompts]
    before, steps = llm.engine.compilations.count, llm.stats.steps
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.compilations.count == before
    assert len(outputs) == NUM_REQUESTS
    assert all(output.finished and len(o.token_ids) >= 1 for output in outputs for o in output.outputs)
    assert llm.stats.steps - steps > 100
    assert llm.stats.preemptions > 0
    assert {p.bucket for p in llm.engine.runner.programs.ready} == set(llm.engine.runner.programs.buckets)
    # The counter counts: something new compiles.
    jnp.arange(7) * np.pi
    assert llm.engine.compilations.count > before
