"""Models that several devices divide give the tokens that they give on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.random_model import MoEShape, Shape, write_random_model
from llmjax import LLM, quantize
from llmjax.errors import ConfigError
from tests.engine.on_devices import found_on_devices

GOLDENS = Path(__file__).parents[1] / "models" / "golden"
GOLDEN = GOLDENS / "llama"
CASES = ("q4_k_m, 3 keys, int8 cache", "gptq, 8 keys", "q4_k experts", "drafts", "windows")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def on_devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    write_random_model(folder / "three", Shape(576, 512, 1, 9, 3, 515), max_position_embeddings=64)
    write_random_model(folder / "eight", Shape(256, 384, 1, 8, 8, 515), max_position_embeddings=64)
    experts = MoEShape(256, 256, 1, 4, 2, 515, experts=4, experts_per_token=2, size_of_head=64)
    write_random_model(folder / "experts", experts, max_position_embeddings=64)
    quantize(str(folder / "three"), folder / "three.gguf", scheme="q4_k_m", skip_tokenizer_init=True)
    gptq: dict[str, Any] = {"scheme": "int4", "format": "gptq", "group_size": 64, "skip_tokenizer_init": True}
    quantize(str(folder / "eight"), folder / "gptq", **gptq)
    cases: tuple[dict[str, Any], ...] = (
        {"model": str(folder / "three.gguf"), "devices": [1, 2], "settings": {"kv_cache_dtype": "int8"}},
        {"model": str(folder / "gptq"), "devices": [1, 3]},
        {"model": str(folder / "experts"), "devices": [1, 4], "settings": {"quantization": "q4k"}},
        {
            "model": str(GOLDEN),
            "devices": [1, 2],
            "settings": {"speculative_config": NGRAM, "kv_offloading_size": 0.01},
        },
        {"model": str(GOLDENS / "gemma3"), "devices": [1, 3]},
    )
    return found_on_devices(dict(zip(CASES, cases, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_device(on_devices: dict[str, Any], case: str) -> None:
    one, several = on_devices[case]
    assert several["tokens"] == one["tokens"]
    greedy, _, again, *_ = several["tokens"]
    assert greedy == again


@pytest.mark.slow
def test_drafts_are_verified_on_several_devices(on_devices: dict[str, Any]) -> None:
    assert all(found["draft_tokens"] > 0 for found in on_devices["drafts"])


@pytest.mark.slow
def test_pages_of_several_devices_come_back_from_host_memory(on_devices: dict[str, Any]) -> None:
    for found in on_devices["drafts"]:
        assert found["host_hits"] == 16  # four pages of the first prompt
        assert found["tokens"][-1] == found["tokens"][0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_those_of_one_device(on_devices: dict[str, Any], case: str) -> None:
    one, several = on_devices[case]
    for found, expected in zip(several["logprobs"], one["logprobs"], strict=True):
        assert [token for token, _ in found] == [token for token, _ in expected]
        np.testing.assert_allclose([x for _, x in found], [x for _, x in expected], atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_copies_no_pages(on_devices: dict[str, Any], case: str) -> None:
    several = on_devices[case][1]
    assert several["page_mentions"] and not several["page_copies"]


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        LLM(str(GOLDEN), skip_tokenizer_init=True, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_cannot_be() -> None:
    assert refused(tensor_parallel_size=0) == "tensor_parallel_size must be at least 1, not 0"
    assert refused(device_ids="0,0") == "device_ids names device 0 twice: '0,0'"
    assert refused(device_ids="0,x").startswith("device_ids must be numbers of devices such as 0,1")
    assert refused(device_ids="0,1", tensor_parallel_size=3) == (
        "tensor_parallel_size is 3, but device_ids names 2 devices"
    )
    if len(jax.devices("cpu")) > 1:  # opened, as one device, where nobody has said how many
        pytest.skip("there are several")
    assert refused(device="cpu", tensor_parallel_size=2).startswith("tensor_parallel_size is 2; there is 1")
    assert refused(device="cpu", device_ids="0,3").startswith("device_ids names device 3; there is 1")
