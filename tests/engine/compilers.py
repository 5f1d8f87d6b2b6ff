"""Compilers of the steps of small models, for tests that look at one step."""

from __future__ import annotations

from typing import Any

from llmjax.config import EngineConfig
from llmjax.engine.loading.memory import plan_kv
from llmjax.engine.loading.model import load_model
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.kernels.attention import KVLayout
from llmjax.platforms import select_platform
from tests.checkpoints import GOLDEN

TOP = 2  # reported alternatives of each token


def compiler_of(name: str, *, slots: int = 4, decode_steps: int = 1, **settings: Any) -> StepCompiler:
    """The compiler of a golden model in f32.

    Args:
        slots: rows of steps; there may be pages for more (``max_num_seqs``).
        settings: the engine's settings, in addition to those below or in their place.
    """
    config = EngineConfig(
        model=str(GOLDEN / name), dtype="float32", **{"page_size": 4, "kv_cache_memory_bytes": 2**18, **settings}
    )
    platform = select_platform(config)
    config = config.with_sizes(platform.step_sizes)
    model = load_model(config, platform)
    layout = KVLayout.of(platform.kv_dtype(config.kv_cache_dtype), page_size=config.page_size)
    return StepCompiler(
        model=model,
        platform=platform,
        kv_plan=plan_kv(config, model.graph.config, platform, layout=layout),
        max_num_seqs=slots,
        max_num_batched_tokens=16,
        max_logprobs=TOP,
        decode_steps=decode_steps,
    )
