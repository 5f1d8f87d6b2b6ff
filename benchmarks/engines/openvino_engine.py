"""OpenVINO GenAI: its continuous batching pipeline, which reads the GGUF file itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai

from benchmarks.engines.interface import EngineOptions


class OpenVINOEngine:
    """Adapter. Types are OpenVINO's defaults for a CPU (bfloat16 with AMX, 8-bit KV cache)."""

    def __init__(self, options: EngineOptions) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = options.max_streams
        scheduler.max_num_batched_tokens = 2048
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)

    def details(self) -> dict[str, str]:
        return {"openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__}

    def warm_up(self) -> None:
        """Nothing is left to compile."""

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.do_sample = False
        config.ignore_eos = True
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self._pipeline.generate(ids, [config] * len(ids))
        return [[int(token) for token in result.m_generation_ids[0]] for result in results]

    def close(self) -> None:
        """The process ends."""
