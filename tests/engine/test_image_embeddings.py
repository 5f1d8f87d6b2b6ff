"""Vectors of prompts with pictures, by models that see: against transformers' logits, which a head makes of the same
hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from llmjax import LLM, PoolingParams
from llmjax.errors import InvalidRequest
from tests.checkpoints import SEEING
from tests.engine.test_images import CASES, golden, prompt_of
from tests.levels import at_levels

pytestmark = pytest.mark.jax_api


def options(name: str, compile_cache_dir: str) -> dict[str, Any]:
    return {
        "model": str(SEEING / name),
        "runner": "pooling",
        "dtype": "float32",
        "page_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64 if name == "gemma3" else 16,
        "max_model_len": 160,
        "kv_cache_memory_bytes": 2**20,
        "compilation_cache_dir": compile_cache_dir,
        "compile_threads": 1,
    }


def head_of(folder: Path) -> np.ndarray:
    """The embedding, which is the head of these checkpoints."""
    with safe_open(folder / "model.safetensors", "np") as file:
        (name,) = (name for name in file.keys() if name.endswith("embed_tokens.weight"))  # noqa: SIM118
        found: np.ndarray = file.get_tensor(name).astype(np.float32)
        return found


@pytest.mark.parametrize("name", at_levels(["qwen2-vl", "qwen3-vl", "gemma3"], fast=["qwen2-vl"]))
def test_vectors_are_the_hidden_states_of_transformers_logits(name: str, compile_cache_dir: str) -> None:
    settings = options(name, compile_cache_dir)
    llm = LLM(settings.pop("model"), **settings)
    head = head_of(SEEING / name)
    prompts = [prompt_of(name, case) for case in CASES]
    outputs = llm.embed(prompts, pooling_params=PoolingParams(normalize=False), use_tqdm=False)
    for case, output in zip(CASES, outputs, strict=True):
        expected = golden(name)[f"{case}/logits"][-1]
        assert output.prompt_token_ids == golden(name)[f"{case}/tokens"].tolist()
        np.testing.assert_allclose(head @ np.array(output.outputs.embedding), expected, atol=2e-4)
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens does not go with images"):
        llm.embed(prompts[1:2], truncate_prompt_tokens=4, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="0 images"):
        llm.embed([{"prompt": prompts[1]["prompt"]}], use_tqdm=False)
    llm.close()
