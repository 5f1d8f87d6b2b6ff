"""BLIP in whole engines: captions and logits are those of transformers, however prompts are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llmjax import LLM, SamplingParams
from llmjax.errors import InvalidRequest
from tests.engine.test_images import PAGE, TOLERANCE, check, engine_of, golden, log_softmax, prompt_of, rows_of, scored
from tests.levels import at_levels

pytestmark = pytest.mark.jax_api

NAME = "blip"
CASES = ["one", "first"]
ROWS = 10


@pytest.fixture(scope="module", params=at_levels([1, 7, 64], fast=[7], slow=[1, 64]))
def llm(request: Any, compile_cache_dir: str) -> Iterator[LLM]:
    budget = request.param
    llm = engine_of(
        NAME, compile_cache_dir, max_num_batched_tokens=max(budget, 2), max_num_seqs=min(2, budget), max_model_len=100
    )
    yield llm
    media = llm.engine.scheduler.media
    llm.engine.kv.check()
    media.check()
    assert (llm.kv_stats().used, media.used) == (0, 0)
    llm.close()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_captions_are_those_of_transformers(llm: LLM, case: str) -> None:
    params = scored(max_tokens=32, prompt_logprobs=-1, ignore_eos=True)
    (output,) = llm.generate([prompt_of(NAME, case)], params, use_tqdm=False)
    check(NAME, case, output, prompt=False)
    expected = log_softmax(golden(NAME)[f"{case}/logits"])
    assert output.prompt_logprobs is not None
    found = rows_of(output.prompt_logprobs[1 + ROWS :], expected.shape[1]).reshape(-1, expected.shape[1])
    np.testing.assert_allclose(found, expected[ROWS:-1], atol=TOLERANCE)
    caption = golden(NAME)[f"{case}/caption"].tolist()
    assert list(output.outputs[0].token_ids)[: len(caption)] == caption


def test_what_the_tokenizer_adds_is_taken_away(llm: LLM) -> None:
    """BERT's puts tokens around a text."""
    prompt = prompt_of(NAME, "one")
    prompt["prompt"] = f"[CLS]{prompt['prompt']}[SEP]"
    (output,) = llm.generate([prompt], scored(max_tokens=1), use_tqdm=False)
    check(NAME, "one", output, prompt=False)


def test_prefixes_and_requests_at_once(llm: LLM) -> None:
    """What is found in the cache, also inside the picture, is as if it had been computed."""
    llm.reset_prefix_cache()
    prompts = [prompt_of(NAME, case) for case in CASES]
    for found in (False, True):
        for case, output in zip(CASES, llm.generate(prompts, scored(max_tokens=1), use_tqdm=False), strict=True):
            check(NAME, case, output, prompt=False)
            pages = (len(output.prompt_token_ids or ()) - 1) // PAGE * PAGE
            assert output.num_cached_tokens == (pages if found else 0)
    several = llm.generate(prompts, scored(max_tokens=12, n=2, ignore_eos=True), use_tqdm=False)
    for case, output in zip(CASES, several, strict=True):
        caption = golden(NAME)[f"{case}/caption"].tolist()
        assert all(list(one.token_ids) == caption[:12] for one in output.outputs)


@pytest.mark.slow
def test_a_preempted_request_says_the_same(compile_cache_dir: str) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "max_model_len": 64}
    llm = engine_of(NAME, compile_cache_dir, **options)
    page_bytes = llm.info.kv_bytes // (llm.info.kv_tokens // PAGE)
    llm.close()
    tight = engine_of(NAME, compile_cache_dir, kv_cache_memory_bytes=18 * page_bytes, **options)
    params = scored(max_tokens=32, ignore_eos=True)
    outputs = tight.generate([prompt_of(NAME, case) for case in CASES], params, use_tqdm=False)
    for case, output in zip(CASES, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == golden(NAME)[f"{case}/caption"].tolist()
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None) > 0
    tight.close()


def test_a_prompt_has_one_picture_at_its_start(llm: LLM) -> None:
    picture = Image.fromarray(np.zeros((9, 9, 3), np.uint8))
    for prompt, reason in [
        ("a photo of", "has one image, at its start; there are 0"),
        ({"prompt_token_ids": [64, 65]}, "there are 0"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": [picture] * 2}}, "there are 2"),
        ({"prompt": "a photo of <image>", "multi_modal_data": {"image": picture}}, "must be at the start"),
        ({"prompt": "a photo of", "multi_modal_data": {"image": picture}}, "0 image placeholders"),
    ]:
        with pytest.raises(InvalidRequest, match=reason):
            llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)  # type: ignore[list-item]
