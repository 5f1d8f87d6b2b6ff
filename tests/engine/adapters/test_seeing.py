"""Adapters of models that see: logits against PEFT's, also where the adapter changes the encoder of images."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from llmjax import LLM, LoRARequest, SamplingParams
from llmjax.adapters.read import AdapterReader
from llmjax.checkpoint import open_checkpoint
from llmjax.errors import CheckpointError
from llmjax.outputs import RequestOutput
from tests.checkpoints import SEEING, SEEING_ADAPTERS
from tests.levels import at_levels

TOLERANCE = 2e-4
NAMES = sorted(path.name for path in SEEING_ADAPTERS.iterdir())
BASES = {name: (SEEING_ADAPTERS / name / "base.txt").read_text() for name in NAMES}
FAST = ["llava", "llava-dora", "llava-text", "qwen2_5-vl-patches"]


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(SEEING_ADAPTERS / name / "golden.npz") as arrays:
        return dict(arrays)


@cache
def of_base(base: str) -> dict[str, np.ndarray]:
    with np.load(SEEING / base / "golden.npz") as arrays:
        return dict(arrays)


def engine_of(base: str, compile_cache_dir: str, **settings: Any) -> LLM:
    """An engine in which a prompt's log-probabilities are those of all tokens."""
    return LLM(
        str(SEEING / base),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=96,
        max_model_len=160,
        max_logprobs=of_base(base)["one/logits"].shape[1],
        kv_cache_memory_bytes=2**20,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
        **settings,
    )


def prompt_of(base: str) -> dict[str, Any]:
    """The golden prompt with its picture."""
    found = of_base(base)
    pictures = [Image.fromarray(found[f"image{number}"]) for number in found["one/images"]]
    return {"prompt": found["one/prompt"].tobytes().decode(), "multi_modal_data": {"image": pictures}}


def request_of(name: str) -> LoRARequest:
    return LoRARequest(f"lora-{name}", NAMES.index(name) + 1, str(SEEING_ADAPTERS / name))


def params_of(base: str) -> SamplingParams:
    """The log-probabilities of all tokens."""
    size = of_base(base)["one/logits"].shape[1]
    return SamplingParams(temperature=0, max_tokens=1, logprobs=size, prompt_logprobs=size, detokenize=False)


def ask(llm: LLM, base: str, adapters: list[str | None]) -> list[RequestOutput]:
    """Asks about the same picture with several adapters at once."""
    requests = [None if name is None else request_of(name) for name in adapters]
    return llm.generate([prompt_of(base)] * len(adapters), params_of(base), use_tqdm=False, lora_request=requests)


def check(output: RequestOutput, logits: np.ndarray) -> None:
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    assert output.error is None and output.prompt_logprobs is not None
    entries = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]  # type: ignore[index]
    found = np.array([[entry[token].logprob for token in range(expected.shape[1])] for entry in entries])  # type: ignore[index]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module", params=at_levels(sorted(set(BASES.values())), fast=["llava", "qwen2_5-vl"], slow=[]))
def base_and_llm(request: pytest.FixtureRequest, compile_cache_dir: str) -> Iterator[tuple[str, LLM]]:
    llm = engine_of(request.param, compile_cache_dir, enable_lora=True, max_loras=3, max_lora_rank=8)
    yield request.param, llm
    llm.engine.scheduler.media.check()
    llm.close()


def test_the_same_picture_with_several_adapters_and_without(base_and_llm: tuple[str, LLM]) -> None:
    """Alone and all at once, first and again from caches: the logits are PEFT's, and without one those of the base."""
    base, llm = base_and_llm
    names = [name for name in NAMES if BASES[name] == base]
    asked: list[list[str | None]] = [[name] for name in names]
    for adapters in (*asked, [None], [None, *names], [*names, None]):
        for name, output in zip(adapters, ask(llm, base, adapters), strict=True):
            check(output, of_base(base)["one/logits"] if name is None else golden(name)["logits"])


def test_only_adapters_that_change_the_encoder_have_pictures_of_their_own(compile_cache_dir: str) -> None:
    llm = engine_of("llava", compile_cache_dir, enable_lora=True, max_loras=3, max_lora_rank=8)
    asked: list[str | None] = ["llava-text", None, "llava", "llava-dora", None, "llava"]
    media = llm.engine.scheduler.media
    used = [ask(llm, "llava", [name]) and media.num_rows - media.free for name in asked]
    llm.close()
    (rows,) = of_base("llava")["image1/rows"].shape[:1]
    assert used == [rows, rows, 2 * rows, 3 * rows, 3 * rows, 3 * rows]


@pytest.mark.parametrize("name", at_levels(NAMES, fast=["llava-dora"], slow=NAMES))
def test_merged_into_weights(name: str, compile_cache_dir: str) -> None:
    llm = engine_of(BASES[name], compile_cache_dir, lora_fused=str(SEEING_ADAPTERS / name))
    (output,) = llm.generate(prompt_of(BASES[name]), params_of(BASES[name]), use_tqdm=False)
    llm.close()
    check(output, golden(name)["merged"])


def test_a_tower_that_the_base_does_not_have_is_an_error(tmp_path: Path) -> None:
    other = SEEING_ADAPTERS / "qwen2_5-vl-patches"
    tensors = load_file(other / "adapter_model.safetensors")
    seeing = {name: tensor for name, tensor in tensors.items() if ".visual." in name}
    save_file(seeing, tmp_path / "adapter_model.safetensors")
    shutil.copy(other / "adapter_config.json", tmp_path)
    checkpoint = open_checkpoint(SEEING / "llava")
    reader = AdapterReader(checkpoint, checkpoint.model_config(), {}, most_rank=8)
    with pytest.raises(CheckpointError, match=r"visual\..*has an adapter, but is not a matrix"):
        reader.read(tmp_path, "")
