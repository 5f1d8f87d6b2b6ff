"""Whole engines on the golden checkpoints: greedy tokens against plain runs, log-probabilities against Hugging Face's.

Budget and pages are small, so that prompts are cut into chunks, steps mix prefill with decode, windows move on, and
sequences lose their pages on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.engine.loading import memory
from tests.checkpoints import GOLDEN
from tests.levels import at_levels

pytestmark = pytest.mark.jax_api

TOLERANCE = 2e-4
KV_BYTES = {  # 20 to 28 pages of full attention: less than two requests of 64 tokens
    "llama": 28 * 1536,
    "llama-bias": 28 * 1024,
    "mistral": 28 * 3072,
    "qwen2": 28 * 1536,
    "qwen3": 28 * 2304,
    "gemma3": 20 * 768 + 14 * 1536,
    "qwen3-moe": 28 * 2304,
    "deepseek-v2": 28 * 1152,
    "qwen3-next": 28 * 1024 + 13 * 24192,  # recurrent states of three layers: 4 * 16 * 24 + 3 * 160 floats each
    "mamba2": 13 * 13248,  # states alone: 8 * 12 * 8 + 3 * 112 floats in each of three layers
    "granite4": 28 * 512 + 13 * 8832,  # two layers with such states
}
STATE_SHARE = 0.92  # of the memory of hybrids, for few pages and more states than a prompt has pages
# In the bucket that is compiled first, which compiles sooner, or in all of them.
EVERY_BUCKET = ", all buckets"
FAST = [f"llama{EVERY_BUCKET}", "qwen2", "qwen3-next"]  # all tokens; all and windows; all and states
MORE = [f"{name}{EVERY_BUCKET}" for name in ("gemma3", "qwen3-next")]
MORE += [name for name in KV_BYTES if name not in ("llama", "gemma3", "qwen2", "qwen3-next")]


class Served(NamedTuple):
    """A golden checkpoint in an engine."""

    name: str
    llm: LLM
    all_buckets: bool


@pytest.fixture(
    scope="module",
    params=at_levels([*FAST, *MORE], fast=FAST, slow=(f"gemma3{EVERY_BUCKET}", "qwen3-moe", "deepseek-v2", "mamba2")),
)
def engine(request: Any, compile_cache_dir: str) -> Iterator[Served]:
    all_buckets = request.param.endswith(EVERY_BUCKET)
    name = request.param.removesuffix(EVERY_BUCKET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "STATE_SHARE", STATE_SHARE)
        llm = LLM(
            str(GOLDEN / name),
            skip_tokenizer_init=True,
            dtype="float32",
            page_size=4,
            max_num_seqs=2 if name == "gemma3" else 4,  # its programs take the longest to compile
            max_num_batched_tokens=16,
            kv_cache_memory_bytes=KV_BYTES[name],
            compilation_cache_dir=compile_cache_dir,
            compile_threads=2 if all_buckets else 1,
        )
    if all_buckets:
        llm.engine.runner.programs.wait_all()
    yield Served(name, llm, all_buckets)
    llm.engine.kv.check()
    assert llm.kv_stats().used == 0
    llm.close()


def golden(name: str) -> tuple[list[int], np.ndarray]:
    """The long prompt and log_softmax of Hugging Face's logits after each of its tokens."""
    with np.load(GOLDEN / name / "golden.npz") as archive:
        logits = archive["long/logits"].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        return archive["long/tokens"].tolist(), logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def test_greedy_tokens_of_mixed_batches(engine: Served, plain: Callable[[str], Any]) -> None:
    name, llm, _ = engine
    rng = np.random.default_rng(1)
    long = golden(name)[0]
    prompts = [long, long[:17], *(rng.integers(0, 96, n).tolist() for n in (1, 5, 30, 21)), [*long[:31], 7]]
    lengths = [24, 40, 30, 3, 20, 1, 12]
    params = [greedy(length) for length in lengths]
    expected = [plain(name).greedy(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    preemptions, hits = llm.stats.preemptions, llm.stats.prefix_cache_hits
    for _ in range(2):  # the second time prompts and outputs are in the prefix cache, as far as it reaches
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.stats.prefix_cache_hits > hits
    if None in llm.model_config.windows:
        assert llm.stats.preemptions > preemptions


def test_logprobs_at_every_length_of_a_cached_prefix(engine: Served) -> None:
    name, llm, all_buckets = engine
    tokens, expected = golden(name)
    prompts = [tokens[:length] for length in range(1, len(tokens) + 1)]
    llm.engine.kv.reset_prefix_cache()
    for cached in (False, True):
        for prompt, row in zip(prompts, expected, strict=True):
            (output,) = llm.generate(prompt, greedy(1, logprobs=20), use_tqdm=False)
            if cached:  # all full pages but those of the last token
                assert output.num_cached_tokens == (len(prompt) - 1) // 4 * 4
            assert output.outputs[0].logprobs is not None
            (entry,) = output.outputs[0].logprobs
            check_entry(entry, row, sampled=int(row.argmax()), top=20)
            assert output.outputs[0].cumulative_logprob == pytest.approx(row.max(), abs=TOLERANCE)
        if not all_buckets:
            return  # the mixed bucket has been through it all


def test_prompt_logprobs_over_chunks_and_cached_prefixes(engine: Served) -> None:
    name, llm, _ = engine
    tokens, expected = golden(name)
    llm.generate(tokens, greedy(1), use_tqdm=False)  # its pages are cached; scoring must not skip them
    prompts = [tokens, tokens[:1], tokens[:17], tokens[:33]]
    outputs = llm.generate(prompts, greedy(2, prompt_logprobs=3, logprobs=0), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
            assert entry is not None
            check_entry(entry, expected[position - 1], sampled=prompt[position], top=3)
        assert output.outputs[0].logprobs is not None
        check_entry(output.outputs[0].logprobs[0], expected[len(prompt) - 1], sampled=None, top=0)


def check_entry(entry: Any, row: np.ndarray, *, sampled: int | None, top: int) -> None:
    """One position's log-probabilities against the whole row f64 [V]."""
    token = next(iter(entry))
    assert sampled is None or token == sampled
    order = np.argsort(-row, kind="stable")
    assert set(entry) == {token, *order[:top].tolist()}
    for other, value in entry.items():
        assert abs(value.logprob - row[other]) <= TOLERANCE
        assert value.rank == 1 + int((row > row[other]).sum())
