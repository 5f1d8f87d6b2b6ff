"""Greedy tokens after a picture, against those that llama.cpp's ``mtmd`` and its text model write."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from llmjax import LLM, SamplingParams
from tests.checkpoint.gguf.golden.mtmd_cases import CASES, HERE, picture
from tests.checkpoints import SEEING
from tests.levels import at_levels

# Those whose encoder llama.cpp computes as transformers does, and whose text model its converter knows.
NAMES = ["qwen2-vl", "qwen3-vl", "pixtral", "mistral3"]


@pytest.mark.parametrize("name", at_levels(NAMES, fast=["qwen2-vl"]))
def test_tokens_are_those_of_llama_cpp(name: str, compile_cache_dir: str) -> None:
    case = CASES[name]
    with np.load(HERE / f"{name}.npz") as golden, np.load(SEEING / name / "golden.npz") as pictures:
        tokens, written, image = golden["tokens"], golden["next"], picture(pictures["image2"], case)
    llm = LLM(
        str(SEEING / name),
        dtype="float32",
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=96,
        max_model_len=160,
        kv_cache_memory_bytes=2**20,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
    )
    prompt = {
        "prompt": f"One: {case.placeholder} what?\n",
        "multi_modal_data": {"image": Image.fromarray(image)},
    }
    (output,) = llm.generate(
        [prompt], SamplingParams(max_tokens=len(written), temperature=0, ignore_eos=True), use_tqdm=False
    )
    llm.close()
    ids = np.array(output.prompt_token_ids)
    assert len(ids) == len(tokens)
    np.testing.assert_array_equal(ids[tokens >= 0], tokens[tokens >= 0])
    assert list(output.outputs[0].token_ids) == written.tolist()
