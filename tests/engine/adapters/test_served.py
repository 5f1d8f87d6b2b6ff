"""Whole engines with adapters: tokens against plain runs of PEFT's logits, whatever else is in the batch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmjax import LLM
from llmjax.adapters.reference import Adaptation
from llmjax.checkpoint import open_checkpoint
from llmjax.errors import CheckpointError
from llmjax.quantization.gguf_export import export_gguf
from tests.checkpoints import ADAPTERS, GOLDEN
from tests.engine.adapters.asking import Asking, adaptation, golden

TOLERANCE = 2e-4
NAMES = ("plain", "other", "rslora")


@pytest.fixture(scope="module")
def asking(compile_cache_dir: str) -> Iterator[Asking]:
    llm = LLM(
        str(GOLDEN / "llama"),
        skip_tokenizer_init=True,
        dtype="float32",
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=28 * 1536,  # less than two requests of 64 tokens
        compilation_cache_dir=compile_cache_dir,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    )
    yield Asking(llm)
    llm.engine.kv.check()
    assert llm.kv_stats().used == 0
    llm.close()


def test_log_probabilities_of_a_mixed_batch(asking: Asking) -> None:
    """More adapters than slots: some wait, and slots get other adapters while requests run."""
    asked = [(golden(name)[0], adaptation(name)) for name in NAMES]
    found = asking.ask([*asked, (golden("plain")[0], None)], scored=True)
    for name, said in zip(NAMES, found, strict=False):
        np.testing.assert_allclose(said.logprobs, golden(name)[1], atol=TOLERANCE, rtol=0)
    (alone,) = asking.ask([(golden("plain")[0], None)], scored=True)
    np.testing.assert_allclose(found[-1].logprobs, alone.logprobs, atol=TOLERANCE, rtol=0)
    assert found[-1].tokens == alone.tokens


def test_tokens_do_not_depend_on_the_batch(asking: Asking) -> None:
    """Long requests that take each other's pages, with prefixes that are found again, each with its own adapter's."""
    prompt = golden("plain")[0]
    asked = [(prompt, adaptation("plain")), (prompt, None), (prompt[:9], adaptation("other")), (prompt, None)]
    alone = [asking.ask([one], tokens=24)[0].tokens for one in asked]
    assert alone[0] != alone[1] == alone[3]
    for _ in range(2):
        assert [said.tokens for said in asking.ask(asked, tokens=24)] == alone


def test_factors_and_sums(asking: Asking) -> None:
    """A factor of zero is the model as it is, and half of an adapter twice is the adapter."""
    tokens, expected = golden("plain")
    (nothing,) = asking.ask([(tokens, adaptation("plain", 0.0))], scored=True)
    (plain,) = asking.ask([(tokens, None)], scored=True)
    np.testing.assert_allclose(nothing.logprobs, plain.logprobs, atol=1e-6)
    half = adaptation("plain", 0.5).parts
    (whole,) = asking.ask([(tokens, Adaptation.of([*half, *half]))], scored=True)
    np.testing.assert_allclose(whole.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_what_does_not_fit_is_an_error_of_its_request(asking: Asking) -> None:
    runner = asking.engine.runner
    for name, message in (
        ("gpt2", "is not a matrix that the model only multiplies with"),
        ("saved", "has rank 32; max_lora_rank is 8"),
    ):
        with pytest.raises(CheckpointError, match=message):
            while not runner.can_load(adaptation(name), seconds=1):
                pass


def test_an_adapter_that_is_merged_at_load(compile_cache_dir: str) -> None:
    tokens, expected = golden("plain")
    llm = LLM(
        str(GOLDEN / "llama"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=1,
        max_num_batched_tokens=32,
        compilation_cache_dir=compile_cache_dir,
        lora_fused=str(ADAPTERS / "plain"),
    )
    (said,) = Asking(llm).ask([(tokens, None)], scored=True)
    np.testing.assert_allclose(said.logprobs, expected, atol=TOLERANCE, rtol=0)
    llm.close()


@pytest.mark.slow
def test_weights_beneath_may_be_quantized(compile_cache_dir: str, tmp_path: Path) -> None:
    """Against the same adapter in PEFT's place: merged into the weights as the file's blocks say them."""
    path = tmp_path / "llama.gguf"
    export_gguf(open_checkpoint(GOLDEN / "llama"), path, scheme="q8_0")
    common = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "activations": "float",
        "max_num_seqs": 1,
        "max_num_batched_tokens": 32,
        "compilation_cache_dir": compile_cache_dir,
    }
    tokens, _ = golden("plain")
    beneath = LLM(str(path), enable_lora=True, **common)
    (found,) = Asking(beneath).ask([(tokens, adaptation("plain"))], scored=True)
    beneath.close()
    folder = dequantized(path, tmp_path / "dequantized")
    fused = LLM(str(folder), lora_fused=str(ADAPTERS / "plain"), **common)
    (expected,) = Asking(fused).ask([(tokens, None)], scored=True)
    fused.close()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)
    assert found.tokens == expected.tokens


def dequantized(path: Path, folder: Path) -> Path:
    """A GGUF file of a Llama as a folder in f32."""
    shutil.copytree(GOLDEN / "llama", folder, ignore=shutil.ignore_patterns("*.npz", "*.npy"))
    tensors = open_checkpoint(path).tensors
    values = {name: np.ascontiguousarray(one.read(np.dtype(np.float32))) for name, one in tensors.items()}
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_drafts_change_no_token(compile_cache_dir: str) -> None:
    """Texts that repeat themselves, so that many drafts are right; an adapter changes what they are verified with."""
    prompt = golden("plain")[0] * 2
    asked = [(prompt, adaptation("plain")), (prompt, None)]
    found = []
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}):
        llm = LLM(
            str(GOLDEN / "llama"),
            skip_tokenizer_init=True,
            dtype="float32",
            max_num_seqs=2,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=2**20,
            compilation_cache_dir=compile_cache_dir,
            enable_lora=True,
            max_lora_rank=4,
            speculative_config=drafts,
        )
        llm.engine.runner.programs.wait_all()
        found.append([said.tokens for said in Asking(llm).ask(asked, tokens=20)])
        if drafts is not None:
            assert llm.stats.draft_tokens > 0
        llm.close()
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
