"""Models that several devices divide give the tokens that they give on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from benchmarks.random_model import MoEShape, Shape, write_random_model
from llmjax import LLM, quantize
from llmjax.errors import ConfigError
from tests.checkpoints import GOLDEN
from tests.engine.on_devices import found_on_devices
from tests.levels import at_levels

pytestmark = pytest.mark.jax_api

LLAMA = GOLDEN / "llama"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


# Models are golden ones, or made by `made`.
CASES: dict[str, dict[str, Any]] = {
    "q4_k_m, 3 keys, int8 cache": {"model": "three.gguf", "devices": [1, 2], "settings": {"kv_cache_dtype": "int8"}},
    "gptq, 8 keys": {"model": "gptq", "devices": [1, 3]},
    "q4_k experts": {"model": "experts", "devices": [1, 4], "settings": {"quantization": "q4k"}},
    "drafts": {
        "model": "llama",
        "devices": [1, 2],
        "settings": {"speculative_config": NGRAM, "kv_offloading_size": 0.01},
    },
    "windows": {"model": "gemma3", "devices": [1, 3]},
}


def made(folder: Path, model: str) -> Path:
    """A model in a folder that is empty."""
    options: dict[str, Any] = {"skip_tokenizer_init": True}
    if model == "experts":
        shape = MoEShape(256, 256, 1, 4, 2, 515, experts=4, experts_per_token=2, size_of_head=64)
        write_random_model(folder / model, shape, max_position_embeddings=64)
    elif model == "gptq":
        write_random_model(folder / "eight", Shape(256, 384, 1, 8, 8, 515), max_position_embeddings=64)
        quantize(str(folder / "eight"), folder / model, scheme="int4", format="gptq", group_size=64, **options)
    elif model == "three.gguf":
        write_random_model(folder / "three", Shape(576, 512, 1, 9, 3, 515), max_position_embeddings=64)
        quantize(str(folder / "three"), folder / model, scheme="q4_k_m", **options)
    else:
        return GOLDEN / model
    return folder / model


class Found(NamedTuple):
    """What engines on one device and on several say of a case."""

    case: str
    one: dict[str, Any]
    several: dict[str, Any]


@pytest.fixture(scope="module", params=at_levels(CASES, slow=("q4_k_m, 3 keys, int8 cache", "drafts")))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    case = CASES[request.param]
    model = made(tmp_path_factory.mktemp("model"), case["model"])
    return Found(request.param, *found_on_devices({request.param: {**case, "model": str(model)}})[request.param])


def test_tokens_are_those_of_one_device(found: Found) -> None:
    assert found.several["tokens"] == found.one["tokens"]
    greedy, _, again, *_ = found.several["tokens"]
    assert greedy == again


def test_drafts_and_pages_from_host_memory(found: Found) -> None:
    """Where there are any."""
    for engine in (found.one, found.several):
        assert bool(engine["draft_tokens"]) == (found.case == "drafts")
        assert engine["host_hits"] == (16 if found.case == "drafts" else 0)  # four pages of the first prompt
        if found.case == "drafts":
            assert engine["tokens"][-1] == engine["tokens"][0]


def test_logprobs_are_those_of_one_device(found: Found) -> None:
    for values, expected in zip(found.several["logprobs"], found.one["logprobs"], strict=True):
        assert [token for token, _ in values] == [token for token, _ in expected]
        np.testing.assert_allclose([x for _, x in values], [x for _, x in expected], atol=2e-3)


def test_a_step_copies_no_pages(found: Found) -> None:
    assert found.several["page_mentions"] and not found.several["page_copies"]


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        LLM(str(LLAMA), skip_tokenizer_init=True, **settings)
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
