"""Engines in the types that users run, bfloat16 and quantized, against the plain f32 model of the same weights.

What the files hold is dequantized for the plain model, so that roundings on the way are all that differs: of
activations, of keys and values, and of what kernels round to eight bits. Distances are Kullback-Leibler divergences in
nats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from llmjax import LLM, SamplingParams
from llmjax.conversion import quantize
from llmjax.models import init_random, model_config
from tests.checkpoints import GOLDEN
from tests.divergence import divergence
from tests.levels import at_levels

VOCAB = 96  # of the golden checkpoints
# Nearly twice what is found here; weights before they were rounded to four bits are tens of times further away.
NEAR = 2e-3
# Sizes whose rows fill the super-blocks of k-quants.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}


def widened(name: str, folder: Path) -> Path:
    """A golden checkpoint's architecture with random weights in super-blocks."""
    folder.mkdir()
    stored = json.loads((GOLDEN / name / "config.json").read_text())
    config = {key: WIDE.get(key, value) for key, value in stored.items()}
    drawn = init_random(model_config(config), jax.random.key(0), dtype=np.dtype(ml_dtypes.bfloat16))
    # Larger than what keeps activations near one, so that the tokens' chances differ.
    params = {key: np.asarray(value * (1 if value.ndim == 1 else 1.6)) for key, value in drawn.items()}
    save_file(params, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def served(path: Path, prompt: list[int], cache: str, **settings: Any) -> tuple[list[int], np.ndarray]:
    """The prompt with what an engine has made of it, and the log-probabilities [n, V] of each token but the first.

    The prompt takes two steps, and each token after it takes one.
    """
    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        max_logprobs=VOCAB,
        kv_cache_memory_bytes=2**21,
        compilation_cache_dir=cache,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=VOCAB, logprobs=VOCAB)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    llm.close()
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    found = np.array([[entry[token].logprob for token in range(VOCAB)] for entry in entries])
    return [*prompt, *output.outputs[0].token_ids], found


def prompt() -> list[int]:
    return np.random.default_rng(0).integers(3, VOCAB, 40).tolist()


BFLOAT16 = ["llama", "qwen3-next", "deepseek-v2", "qwen3-moe"]


@pytest.mark.parametrize("name", at_levels(BFLOAT16, fast=["llama"], slow=BFLOAT16[1:]))
def test_bfloat16(name: str, plain: Callable[[str], Any], compile_cache_dir: str) -> None:
    """Weights, which are stored in it, activations, keys and values."""
    tokens, found = served(GOLDEN / name, prompt(), compile_cache_dir, dtype="bfloat16")
    assert divergence(plain(name).logprobs(tokens)[:-1], found) <= NEAR


STORED = {
    "q4_k_m": ("llama", {"scheme": "q4_k_m"}, {}),
    "q8_0": ("llama", {"scheme": "q8_0"}, {}),
    "q4_k_m of a model with norms of heads": ("qwen3", {"scheme": "q4_k_m"}, {"dtype": "bfloat16"}),
    "GPTQ": ("llama", {"scheme": "int4", "format": "gptq"}, {}),
    "fp8": ("llama", {"scheme": "fp8", "format": "compressed-tensors"}, {}),
    "int8 cache": ("llama", {"scheme": "q8_0"}, {"kv_cache_dtype": "int8"}),
}


@pytest.mark.parametrize("case", at_levels(STORED, fast=["q4_k_m"], slow=[*STORED][1:]))
def test_quantized(case: str, tmp_path: Path, plain_model: type[Any], compile_cache_dir: str) -> None:
    """The default where users set no types: kernels may round activations to eight bits."""
    name, how, settings = STORED[case]
    source, target = widened(name, tmp_path / "source"), tmp_path / ("a" if "format" in how else "a.gguf")
    quantize(str(source), target, skip_tokenizer_init=True, **how)
    tokens, found = served(target, prompt(), compile_cache_dir, **settings)
    assert divergence(plain_model(target).logprobs(tokens)[:-1], found) <= NEAR
    # The bound tells these weights from those that they were rounded from.
    assert divergence(plain_model(source).logprobs(tokens)[:-1], found) > NEAR
