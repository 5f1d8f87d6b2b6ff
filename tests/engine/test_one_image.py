"""Models whose prompts have one image, at the start, in whole engines: logits and tokens are those of their source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from llmjax import LLM, SamplingParams
from llmjax.errors import InvalidRequest
from tests.engine.test_images import PAGE, TOLERANCE, engine_of, golden, log_softmax, prompt_of, rows_of, scored
from tests.levels import at_levels

pytestmark = pytest.mark.jax_api

CASES = {"blip": ["one", "first"], "moondream": ["none", "one", "first"]}
# Tokens of a step; the image of the latter has to be in one.
SIZES = {"blip": (1, 7, 64), "moondream": (30, 64)}
# Tokens at the start whose logits nobody asks for, where a decoder looks rows up.
SKIPPED = {"blip": 10, "moondream": 0}
ALL = [f"{name} in chunks of {size}" for name, sizes in SIZES.items() for size in sizes]
FAST = ["blip in chunks of 7", "moondream in chunks of 30"]


class Seeing(NamedTuple):
    """A golden checkpoint in an engine."""

    name: str
    llm: LLM


@pytest.fixture(scope="module", params=at_levels(ALL, fast=FAST, slow=[each for each in ALL if each not in FAST]))
def engine(request: Any, compile_cache_dir: str) -> Iterator[Seeing]:
    name, _, size = request.param.partition(" in chunks of ")
    budget = max(int(size), 2)
    llm = engine_of(
        name, compile_cache_dir, max_num_batched_tokens=budget, max_num_seqs=min(2, int(size)), max_model_len=100
    )
    yield Seeing(name, llm)
    media = llm.engine.scheduler.media
    llm.engine.kv.check()
    media.check()
    assert (llm.kv_stats().used, media.used) == (0, 0)
    llm.close()


def continued(name: str, case: str) -> list[int]:
    """The 32 likeliest tokens."""
    return [int(token) for token in golden(name)[f"{case}/continued"]]


def check_logits(name: str, case: str, output: Any) -> None:
    """Compares log-probabilities in the prompt and after it."""
    assert output.error is None and list(output.prompt_token_ids) == golden(name)[f"{case}/tokens"].tolist()
    expected, skipped = log_softmax(golden(name)[f"{case}/logits"]), SKIPPED[name]
    found = rows_of([*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]], expected.shape[1])
    np.testing.assert_allclose(found[skipped:], expected[skipped:], atol=TOLERANCE)


def test_logits_and_tokens_are_those_of_the_source(engine: Seeing) -> None:
    name, llm = engine
    for case in CASES[name]:
        params = scored(max_tokens=32, prompt_logprobs=-1, ignore_eos=True)
        (output,) = llm.generate([prompt_of(name, case)], params, use_tqdm=False)
        check_logits(name, case, output)
        tokens = list(output.outputs[0].token_ids)
        expected = continued(name, case)[: len(tokens)]
        assert len(tokens) >= 17 and tokens == expected


def test_prefixes_and_requests_at_once(engine: Seeing) -> None:
    """What is found in the cache, also inside the image, is as if it had been computed."""
    name, llm = engine
    llm.reset_prefix_cache()
    cases = [case for case in CASES[name] if case != "none"]
    prompts = [prompt_of(name, case) for case in cases]
    for again in (False, True):
        outputs = llm.generate(prompts, scored(max_tokens=4, ignore_eos=True), use_tqdm=False)
        for case, output in zip(cases, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == continued(name, case)[:4]
            pages = (len(output.prompt_token_ids or ()) - 1) // PAGE * PAGE
            if name == "blip":
                assert output.num_cached_tokens == (pages if again else 0)
            else:  # no prefix ends inside the image, of whose tokens each depends on all
                assert (output.num_cached_tokens > 0) == (again and pages > 26)
    several = llm.generate(prompts, scored(max_tokens=12, n=2, ignore_eos=True), use_tqdm=False)
    for case, output in zip(cases, several, strict=True):
        assert all(list(one.token_ids) == continued(name, case)[:12] for one in output.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_preempted_request_says_the_same(name: str, compile_cache_dir: str) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": max(16, SIZES[name][0]), "max_model_len": 90}
    llm = engine_of(name, compile_cache_dir, **options)
    page_bytes = llm.info.kv_bytes // (llm.info.kv_tokens // PAGE)
    llm.close()
    cases = [case for case in CASES[name] if case != "none"]
    longest = max(len(golden(name)[f"{case}/tokens"]) for case in cases) + 32
    tight = engine_of(
        name,
        compile_cache_dir,
        kv_cache_memory_bytes=(-(-longest // PAGE) + 3) * page_bytes,
        **{**options, "max_model_len": longest},
    )
    outputs = tight.generate([prompt_of(name, case) for case in cases], scored(max_tokens=32, ignore_eos=True))
    for case, output in zip(cases, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == continued(name, case)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None) > 0
    tight.close()


def test_chats_are_prompts_with_the_image_first(engine: Seeing) -> None:
    name, llm = engine
    prompt = prompt_of(name, "one")
    text = prompt["prompt"].removeprefix("<image>").removeprefix("\n\nQuestion: ").removesuffix("\n\nAnswer:")
    content = [{"type": "text", "text": text}, {"type": "image", "image": prompt["multi_modal_data"]["image"][0]}]
    params = scored(max_tokens=4, ignore_eos=True)
    outputs = llm.chat([{"role": "user", "content": content}], params, chat_template=name, use_tqdm=False)  # type: ignore[list-item]
    assert list(outputs[0].prompt_token_ids or ()) == golden(name)["one/tokens"].tolist()
    assert list(outputs[0].outputs[0].token_ids) == continued(name, "one")[:4]


def test_what_the_tokenizer_adds_to_captions_is_taken_away(engine: Seeing) -> None:
    """BERT's puts tokens around a text."""
    name, llm = engine
    prompt = prompt_of(name, "one")
    if name == "blip":
        prompt["prompt"] = f"[CLS]{prompt['prompt']}[SEP]"
    (output,) = llm.generate([prompt], scored(max_tokens=1, prompt_logprobs=-1), use_tqdm=False)
    check_logits(name, "one", output)


def test_a_prompt_has_one_image_at_its_start(engine: Seeing) -> None:
    name, llm = engine
    picture = Image.fromarray(np.zeros((9, 9, 3), np.uint8))
    wrong: list[tuple[Any, str]] = [
        ({"prompt": "<image><image>", "multi_modal_data": {"image": [picture] * 2}}, "there are 2"),
        ({"prompt": "a photo of <image>", "multi_modal_data": {"image": picture}}, "must be at the start"),
        ({"prompt": "a photo of", "multi_modal_data": {"image": picture}}, "0 image placeholders"),
    ]
    if name == "blip":
        wrong += [("a photo of", "at its start; there are 0"), ({"prompt_token_ids": [64, 65]}, "there are 0")]
    for prompt, reason in wrong:
        with pytest.raises(InvalidRequest, match=reason):
            llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
