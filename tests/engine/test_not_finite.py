"""Logits that are not finite: the request ends with an error that says so, and no other request is affected."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax import LLM, SamplingParams
from llmjax.errors import GenerationFailed
from llmjax.outputs import RequestOutput
from tests.checkpoints import GOLDEN

LLAMA = GOLDEN / "llama"
BROKEN = 50  # the token whose embedding is not finite
GOOD = [[20, 33, 47, 15, 90], [61, 8, 77], [40, 41, 42, 43, 44, 45, 46]]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module", params=[np.nan, np.inf], ids=["nan", "inf"])
def llm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str
) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("broken")
    shutil.copy(LLAMA / "config.json", folder)
    tensors = load_file(LLAMA / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN, 3] = request.param
    save_file(tensors, folder / "model.safetensors")
    made = LLM(
        str(folder),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=28
        * 1536,  # as in test_golden, whose programs these are; few pages: what one request leaves, the next one gets
        skip_tokenizer_init=True,
        compilation_cache_dir=compile_cache_dir,
    )
    yield made
    made.close()


@pytest.fixture
def good(plain: Callable[[str], Any]) -> list[list[int]]:
    return [plain("llama").greedy(prompt, 9) for prompt in GOOD]


def check_failed(output: RequestOutput, tokens: list[int]) -> None:
    assert output.finished and isinstance(output.error, GenerationFailed)
    assert "not finite (NaN or infinity) after" in str(output.error)
    (only,) = output.outputs
    assert (only.finish_reason, only.token_ids) == ("error", tokens)


def check_pages(llm: LLM) -> None:
    llm.engine.kv.check()
    stats = llm.kv_stats()
    assert llm.engine.idle and stats.used == 0 and stats.free + stats.cached == stats.total


def test_a_prompt_that_breaks_the_model_fails_alone(llm: LLM, good: list[list[int]]) -> None:
    broken = [5, 6, 7, 8, 9, 10, 11, 12, BROKEN, 13]
    first, failed, *others = llm.generate([GOOD[0], broken, *GOOD[1:]], GREEDY, use_tqdm=False)
    check_failed(failed, [])
    assert [first.outputs[0].token_ids, *(o.outputs[0].token_ids for o in others)] == good
    check_pages(llm)


def test_what_a_broken_request_leaves_in_its_pages_harms_nobody(
    llm: LLM, good: list[list[int]], plain: Callable[[str], Any]
) -> None:
    for _ in range(3):
        failed = llm.generate([[5, BROKEN, *range(5, 30)]] * 3, GREEDY, use_tqdm=False)
        assert all(output.error is not None for output in failed)
        outputs = llm.generate([*GOOD, [5, 6, 7]], GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [*good, plain("llama").greedy([5, 6, 7], 9)]
    check_pages(llm)


def test_a_failure_between_tokens_keeps_what_was_said(llm: LLM, good: list[list[int]]) -> None:
    """The token is sampled like any other; what comes after it cannot be."""
    params = GREEDY.clone(logit_bias={BROKEN: 100.0}, max_tokens=30)
    for other in (GREEDY, GREEDY.clone(temperature=1.0, seed=1)):
        failed, output = llm.generate([GOOD[0], GOOD[1]], [params, other], use_tqdm=False)
        check_failed(failed, [BROKEN])
        assert output.error is None and len(output.outputs[0].token_ids) == 9
        if other is GREEDY:
            assert output.outputs[0].token_ids == good[1]
    check_pages(llm)


def test_nobody_finds_the_pages_of_a_broken_request(llm: LLM) -> None:
    prompt = [BROKEN, *range(5, 25)]
    for _ in range(2):
        (failed,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        check_failed(failed, [])
        assert failed.num_cached_tokens == 0
