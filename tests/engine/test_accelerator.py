"""The start of an engine on an accelerator, simulated on a CPU: memory, graphs, steps in a dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.build import DECODE_STEPS
from llmjax.errors import ConfigError
from llmjax.kernels.qtensor import QTensor
from llmjax.machine_share import MachineShare
from llmjax.platforms import Platform, select_platform
from tests.checkpoints import GOLDEN

pytestmark = pytest.mark.jax_api

LLAMA = GOLDEN / "llama"
MEMORY = 120_000


@dataclass(frozen=True)
class Card(Platform):
    """The CPU, which behaves like a card with little memory."""

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def is_cuda(self) -> bool:
        return True

    def available_memory(self, utilization: float) -> int:
        return int(MEMORY * utilization)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch, compile_cache_dir: str) -> Callable[..., LLM]:
    def platform(config: EngineConfig, share: MachineShare, **meeting: Any) -> Card:
        return Card(**vars(select_platform(config, share, **meeting)))

    def start(**settings: Any) -> LLM:
        return LLM(
            str(LLAMA),
            dtype="float32",
            skip_tokenizer_init=True,
            page_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            compilation_cache_dir=compile_cache_dir,
            **settings,
        )

    monkeypatch.setattr("llmjax.engine.build.select_platform", platform)
    # A CPU compiles with and without them, and does the same.
    monkeypatch.setattr("llmjax.engine.programs.graphs.GRAPHS", {"xla_gpu_enable_command_buffer": "FUSION"})
    return start


@pytest.mark.slow
def test_pages_get_what_steps_leave(on_card: Callable[..., LLM], plain: Callable[[str], Any]) -> None:
    llm = on_card(gpu_memory_utilization=0.5)
    try:
        llm.warm_up()
        engine = llm.engine
        assert engine.runner.most_steps(2) == DECODE_STEPS  # graphs have passed their test
        state = sum(array.nbytes for array in jax.tree.leaves(engine.runner.executor.state.kv))
        assert state == engine.kv_plan.num_bytes
        left = MEMORY // 2 - engine.kv_plan.num_bytes
        temporaries = max(p.executable.memory_analysis().temp_size_in_bytes for p in engine.runner.programs.ready)
        taken = temporaries + engine.runner.executor.sampler_bytes
        assert taken < left < taken + 8000  # outputs, half a page, and what rounding down costs
        prompts = [[5, 9, 33], list(range(3, 24))]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [plain("llama").greedy(p, 20) for p in prompts]
    finally:
        llm.close()


def test_without_graphs_a_dispatch_is_one_step(on_card: Callable[..., LLM]) -> None:
    llm = on_card(cuda_graphs="off", kv_cache_memory_bytes=1 << 18)
    try:
        assert {bucket.steps for bucket in llm.engine.runner.programs.buckets} == {1}
    finally:
        llm.close()


def test_copies_of_quantized_matrices_are_the_weights_that_they_stand_for(on_card: Callable[..., LLM]) -> None:
    """All but those of the embedding and the head, of which a step reads few rows or multiplies few."""
    found = {}
    for copies in (False, True):
        llm = on_card(quantization="q8_0", dequantized_copies=copies, kv_cache_memory_bytes=1 << 18, cuda_graphs="off")
        try:
            found[copies] = llm.engine.model
            outputs = llm.generate([list(range(3, 24))], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
            assert len(outputs[0].outputs[0].token_ids) == 4
        finally:
            llm.close()
    quantized = {name: w for name, w in found[True].params.items() if isinstance(w, QTensor)}
    copied = {name: weight for name, weight in quantized.items() if weight.copy is not None}
    assert quantized.keys() - copied.keys() == {name for name in quantized if not name.startswith("model.layers.")}
    for weight in copied.values():
        np.testing.assert_array_equal(np.asarray(weight.copy), np.asarray(weight.dequantize().astype(weight.dtype)))
    more = sum(weight.copy.nbytes for weight in copied.values())
    assert more > 0 and found[True].num_bytes == found[False].num_bytes + more


def test_copies_need_a_card() -> None:
    with pytest.raises(ConfigError, match=r"dequantized_copies: steps on .* is for NVIDIA GPUs"):
        LLM(str(LLAMA), device="cpu", quantization="q8_0", dequantized_copies=True, skip_tokenizer_init=True)
