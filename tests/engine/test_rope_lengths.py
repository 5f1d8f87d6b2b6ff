"""Rope scalings that look at a sequence's length, in an engine that serves more than the model was made for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from llmjax import LLM, RequestOutput, SamplingParams
from tests.checkpoints import GOLDEN

LLAMA = GOLDEN / "llama"
ORIGINAL = 24  # tokens, where both scalings change
TOLERANCE = 2e-4


@pytest.fixture(
    scope="module", params=["rope-longrope-grown", pytest.param("rope-dynamic-grown", marks=pytest.mark.slow)]
)
def served(request: pytest.FixtureRequest, plain_model: Callable[..., Any], compile_cache_dir: str) -> Iterator[Any]:
    """The case, an engine, and a plain run of the same model."""
    overrides = json.loads((LLAMA / f"{request.param}.json").read_text())
    llm = LLM(
        str(LLAMA),
        hf_overrides=overrides,
        max_model_len=64,
        skip_tokenizer_init=True,
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=2**20,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
    )
    yield request.param, llm, plain_model(LLAMA, **overrides)
    llm.close()


def generate(llm: LLM, prompt: list[int], count: int) -> tuple[RequestOutput, list[int]]:
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    return output, list(output.outputs[0].token_ids)


def test_prompts_equal_hugging_face_whatever_is_served(served: Any) -> None:
    name, llm, _ = served
    which = {
        "rope-longrope-grown": ("rope-longrope-short", "rope-longrope-long"),
        "rope-dynamic-grown": ("rope-dynamic",),
    }
    with np.load(LLAMA / "golden.npz") as archive:
        for case in which[name]:
            tokens, at = archive[f"{case}/tokens"].tolist(), archive[f"{case}/at"][:-1]
            logits = archive[f"{case}/logits"][:-1].astype(np.float64)
            expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            (output,) = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0))
            for position, row in zip(at, expected, strict=True):
                token = tokens[position + 1]
                assert abs(output.prompt_logprobs[position + 1][token].logprob - row[token]) < TOLERANCE


def test_what_outgrows_the_scaling_goes_on_and_shares_no_keys_with_what_began_beyond_it(served: Any) -> None:
    name, llm, plain = served
    llm.engine.kv.reset_prefix_cache()
    prompt = np.random.default_rng(3).integers(3, 96, 17).tolist()
    _, continued = generate(llm, prompt, 30)
    assert continued == plain.greedy(prompt, 30)
    # The same tokens as a prompt: other keys, although their pages are known.
    longer = prompt + continued[:20]
    output, tokens = generate(llm, longer, 10)
    assert output.num_cached_tokens == 0 and tokens == plain.greedy(longer, 10)
    again, tokens = generate(llm, longer, 10)
    assert again.num_cached_tokens == 36 and tokens == plain.greedy(longer, 10)
    # Where a base grows with each token, another length has other keys; a second table is one for all.
    other, tokens = generate(llm, longer[:33], 10)
    assert other.num_cached_tokens == (32 if "longrope" in name else 0) and tokens == plain.greedy(longer[:33], 10)
    # What is short shares what the first one left.
    short, tokens = generate(llm, longer[:ORIGINAL], 20)
    assert short.num_cached_tokens == 20 and tokens == plain.greedy(longer[:ORIGINAL], 20)
