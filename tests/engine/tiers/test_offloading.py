"""Engines whose experts lie in the host's memory: the tokens of those that have all on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.loading.model import load_model
from llmjax.engine.loading.placement import Placer
from llmjax.errors import ConfigError
from llmjax.kernels.offloading import SplitStack
from llmjax.models import Experts
from llmjax.platforms import select_platform
from tests.checkpoints import GOLDEN

EXPERTS = 8  # of a layer of qwen3-moe


@pytest.mark.slow
def test_same_tokens(engine_of: Callable[..., LLM], plain: Callable[[str], Any]) -> None:
    llm = engine_of("qwen3-moe", num_experts_offload_per_rank=5, max_num_seqs=2)
    stacks = [weight for weight in llm.engine.model.params.values() if isinstance(weight, SplitStack)]
    assert {(stack.shape[0], stack.resident.shape[0]) for stack in stacks} == {(EXPERTS, EXPERTS - 5)}
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 96, length).tolist() for length in (30, 1, 17)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [plain("qwen3-moe").greedy(p, 12) for p in prompts]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_stacks_are_divided_as_they_are_read(quantization: str | None) -> None:
    config = EngineConfig(model=str(GOLDEN / "qwen3-moe"), dtype="float32", quantization=quantization)
    platform = select_platform(config)
    whole = load_model(config, platform)
    split = load_model(config.replace(num_experts_offload_per_rank=3), platform)
    stacks = {name: weight for name, weight in split.params.items() if isinstance(weight, SplitStack)}
    assert len(stacks) == 3 * sum(isinstance(layer.feed_forward, Experts) for layer in split.config.layers)
    assert split.offloaded_bytes == sum(stack.offloaded.nbytes for stack in stacks.values()) > 0
    assert split.num_bytes == whole.num_bytes
    for name, stack in stacks.items():
        assert stack.shape == whole.params[name].shape
        leaves = [jax.tree.leaves(part) for part in (stack.resident, stack.offloaded, whole.params[name])]
        for here, there, both in zip(*leaves, strict=True):
            kinds = [leaf.sharding.memory_kind for leaf in (here, there, both)]
            assert kinds == [both.sharding.memory_kind, "pinned_host", both.sharding.memory_kind]
            together = np.concatenate([np.asarray(here), np.asarray(there).view(here.dtype)])
            assert np.array_equal(together, np.asarray(both))


def test_wrong_numbers(engine_of: Callable[..., LLM]) -> None:
    with pytest.raises(
        ConfigError, match=rf"per_rank is {EXPERTS}; a device has {EXPERTS} experts of each layer, one of which"
    ):
        engine_of("qwen3-moe", num_experts_offload_per_rank=EXPERTS)
    with pytest.raises(ConfigError, match="num_experts_offload_per_rank is 1; the model has no experts"):
        engine_of("llama", num_experts_offload_per_rank=1)
    with pytest.raises(ConfigError, match="num_experts_offload_per_rank must be at least 0"):
        engine_of("llama", num_experts_offload_per_rank=-1)


def test_a_device_that_cannot_read_the_hosts_memory() -> None:
    device = SimpleNamespace(platform="gcu", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    platform = replace(select_platform(EngineConfig()), device=device)
    with pytest.raises(ConfigError, match=r"num_experts_offload_per_rank: .*gcu.* cannot read the host's memory"):
        Placer(platform, activations="float", offloaded=1)


@pytest.mark.cuda
def test_on_a_card(cuda_device: jax.Device) -> None:
    """KV pages from what is free, graphs on, experts on the card and in the host's memory: the same tokens."""
    prompts = [[5, 9, 33], list(range(3, 40))]

    def tokens(**options: Any) -> list[list[int]]:
        llm = LLM(
            str(GOLDEN / "qwen3-moe"),
            device="cuda",
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            **options,
        )
        llm.warm_up()
        stats = llm.engine.platform.device.memory_stats()
        assert stats["peak_bytes_in_use"] <= stats["bytes_limit"]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.close()
        return found

    whole = tokens()
    assert tokens(num_experts_offload_per_rank=5) == whole
    assert tokens(num_experts_offload_per_rank=5, cuda_graphs="off") == whole
