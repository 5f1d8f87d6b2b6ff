"""The two real models in f32 against greedy tokens of Hugging Face on the same files (golden/make_greedy.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmjax import LLM, SamplingParams

GOLDEN = Path(__file__).parent / "golden" / "greedy.json"


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_greedy_continuations(name: str, request: pytest.FixtureRequest, compile_cache_dir: str) -> None:
    path = request.getfixturevalue(f"{name}_path")
    cases = json.loads(GOLDEN.read_text())[name]
    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        dtype="float32",
        activations="float",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=256 * 2**20,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
    )
    windows = [window for window in llm.model_config.windows if window is not None]
    assert windows == ([512] if name == "gemma3" else [])
    assert all(len(cases["long"]["prompt"]) > window for window in windows)
    prompts = [case["prompt"] for case in cases.values()]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = {case: output.outputs[0].token_ids for case, output in zip(cases, outputs, strict=True)}
    assert tokens == {case: expected["output"] for case, expected in cases.items()}
    llm.close()
