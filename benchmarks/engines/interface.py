"""What a compared engine has to do, and which ones there are.

This module, ``worker`` and the adapters run in each engine's own interpreter, which has no llmjax: they import the
standard library and their engine alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What every engine is started with.

    Args:
        model: a .gguf file.
        work_dir: folder for what an engine has to convert; it stays for the next run.
        threads: compute threads.
        max_streams: prompts at once at most.
        max_tokens: tokens of the longest prompt and its answer.
        settings: for this engine alone: ``EngineConfig`` fields of llmjax.
    """

    model: str
    work_dir: str
    threads: int
    max_streams: int
    max_tokens: int
    settings: Mapping[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """An engine with the model loaded, as the constructor leaves it; every adapter is one."""

    def __init__(self, options: EngineOptions) -> None: ...

    def details(self) -> dict[str, str]:
        """Versions and numerics, for the report."""

    def warm_up(self) -> None:
        """Compiles what is compiled lazily; not part of the time from load to first token."""

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Continues all prompts at once, greedily, past ends of sequence and without a prefix cache.

        Returns:
            Exactly ``new_tokens`` token ids for each prompt.
        """

    def close(self) -> None: ...


# Name: module and class; modules are imported in the interpreter that has the engine.
ADAPTERS = {
    "llmjax": "benchmarks.engines.llmjax_engine:LLMJaxEngine",
    "llama.cpp": "benchmarks.engines.llama_cpp_engine:LlamaCppEngine",
    "vllm": "benchmarks.engines.vllm_engine:VLLMEngine",
    "openvino": "benchmarks.engines.openvino_engine:OpenVINOEngine",
}


def adapter(name: str) -> type[Engine]:
    """The adapter's class; the module is imported now."""
    module, _, attribute = ADAPTERS[name].partition(":")
    engine: type[Engine] = getattr(importlib.import_module(module), attribute)
    return engine
