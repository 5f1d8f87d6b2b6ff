"""Whole models in bfloat16 and quantized, as they are served: how far what they say is from Hugging Face's float32.

On a CPU a few of the cases run; all of them on a card: ``JAX_PLATFORMS=cuda,cpu pytest -m cuda``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from tests.checkpoints import GOLDEN
from tests.divergence import divergence

VOCABULARY = 96  # of these models, all of whose log-probabilities are asked for


@dataclass(frozen=True)
class Form:
    """How weights are kept.

    Attributes:
        most: mean Kullback-Leibler divergence in nats. Models so small suffer more than real ones: on a CPU Llama has
            0.0004 in bf16, 0.006 in 8 bits, 0.1 in FP8, 0.17 in Q4_K and 0.56 in int4. One that is wrong has 1 to 2.5.
        quantization: the setting of that name.
    """

    most: float
    quantization: str | None = None


FORMS = {
    "bf16": Form(0.01),
    "q8_0": Form(0.03, "q8_0"),
    "int8": Form(0.03, "int8"),
    "fp8": Form(0.4, "fp8"),
    "q4_k": Form(0.6, "q4_k"),
    "int4": Form(0.9, "int4"),
}
MODELS = ("llama", "qwen3", "gemma3", "qwen3-moe", "deepseek-v2")
LEAST = 1e-9  # what float32 would have


def measured(name: str, form: Form, device: str, **settings: Any) -> float:
    """The divergence of an engine's log-probabilities of a prompt from Hugging Face's; nothing but weights is rounded
    to less than bfloat16."""
    with np.load(GOLDEN / name / "golden.npz") as archive:
        tokens, logits = archive["long/tokens"].tolist(), archive["long/logits"]
    llm = LLM(
        str(GOLDEN / name),
        device=device,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        quantization=form.quantization,
        activations="float",
        page_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_logprobs=VOCABULARY,
        kv_cache_memory_bytes=1 << 20,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=VOCABULARY)
    (output,) = llm.generate(tokens, params, use_tqdm=False)
    llm.close()
    assert output.prompt_logprobs is not None
    found = [[entry[token].logprob for token in range(VOCABULARY)] for entry in output.prompt_logprobs[1:] if entry]
    return divergence(logits[: len(found)], np.array(found))


ON_CPU = {("llama", "bf16")}
CASES = [
    pytest.param(name, form, marks=() if (name, form) in ON_CPU else pytest.mark.slow)
    for name in MODELS
    for form in FORMS
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_on_a_cpu(name: str, form: str, compile_cache_dir: str) -> None:
    found = measured(name, FORMS[form], "cpu", compilation_cache_dir=compile_cache_dir)
    assert LEAST < found < FORMS[form].most


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_on_a_card(name: str, form: str, cuda_device: jax.Device) -> None:
    found = measured(name, FORMS[form], "cuda")
    assert LEAST < found < FORMS[form].most
