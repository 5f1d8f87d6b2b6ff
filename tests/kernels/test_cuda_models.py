"""Whole models on a card: log-probabilities against Hugging Face's, and generation in the shape of SmolLM2-135M."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.random_model import SHAPES, write_random_model
from llmjax import LLM, SamplingParams
from tests.checkpoints import GOLDEN

pytestmark = pytest.mark.cuda

DEVICE = "cuda"


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("name", ["llama", "llama-bias", "mistral", "qwen2", "qwen3", "gemma3"])
def test_golden_log_probabilities(name: str, page_size: int, cuda_device: jax.Device) -> None:
    with np.load(GOLDEN / name / "golden.npz") as archive:
        tokens, logits = archive["long/tokens"].tolist(), archive["long/logits"].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    llm = LLM(
        str(GOLDEN / name),
        device=DEVICE,
        skip_tokenizer_init=True,
        dtype="float32",
        page_size=page_size,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=1 << 20,
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3, logprobs=3)
    (output,) = llm.generate(tokens, params, use_tqdm=False)
    llm.close()
    assert output.prompt_logprobs is not None
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        for token, value in entry.items():
            assert abs(value.logprob - expected[position][token]) <= 1e-3
    assert output.outputs[0].token_ids[0] == int(expected[-1].argmax())


@pytest.mark.parametrize("quantization", [None, "q8_0", "q4_k", "fp8"])
def test_generation_in_the_shape_of_smollm2(quantization: str | None, tmp_path: Path, cuda_device: jax.Device) -> None:
    """Batched greedy tokens in f32 equal those of one request at a time, and log-probabilities those of the CPU, which
    rounds what meets quantized weights to int8: there only the first token is compared."""
    write_random_model(tmp_path, SHAPES["135m"], max_position_embeddings=1024)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 49152, n).tolist() for n in (5, 300, 17, 64)]
    params = SamplingParams(temperature=0, max_tokens=8 if quantization is None else 1, ignore_eos=True, logprobs=0)

    def outputs(device: str, at_once: bool) -> list[tuple[list[int], float | None]]:
        llm = LLM(
            str(tmp_path),
            device=device,
            skip_tokenizer_init=True,
            dtype="float32",
            quantization=quantization,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            kv_cache_memory_bytes=1 << 28,
        )
        batches = [prompts] if at_once else [[prompt] for prompt in prompts]
        found = [output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)]
        llm.close()
        return [(list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob) for output in found]

    together, alone, on_cpu = outputs(DEVICE, True), outputs(DEVICE, False), outputs("cpu", True)
    for one, other, cpu in zip(together, alone, on_cpu, strict=True):
        assert one == (other[0], pytest.approx(other[1], abs=1e-2))
        assert one[1] == pytest.approx(cpu[1], abs=5e-3 if quantization is None else 0.2)
