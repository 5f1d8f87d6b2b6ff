"""llmjax through its public class ``LLM``."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from benchmarks.engines.interface import EngineOptions
from llmjax import LLM, SamplingParams
from llmjax.kernels.cpu.library import describe
from llmjax.version import __version__


class LLMJaxEngine:
    """Adapter; ``options.settings`` are fields of ``EngineConfig`` and win over what the comparison sets."""

    def __init__(self, options: EngineOptions) -> None:
        self._settings = dict(options.settings)
        settings = {
            "max_num_seqs": options.max_streams,
            "max_model_len": options.max_tokens,
            "enable_prefix_caching": False,
            **self._settings,
        }
        self._llm = LLM(options.model, **settings)

    def details(self) -> dict[str, str]:
        extra = {"settings": " ".join(f"{k}={v}" for k, v in self._settings.items())} if self._settings else {}
        return {"llmjax": __version__, "jax": jax.__version__, "kernels": describe(), **extra}

    def warm_up(self) -> None:
        self._llm.warm_up()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def close(self) -> None:
        self._llm.close()
