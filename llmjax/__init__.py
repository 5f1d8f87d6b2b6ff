"""LLM inference on JAX/XLA: ``LLM``, ``AsyncLLM``, ``generate``, ``quantize``, ``SamplingParams`` and their outputs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmjax.collector import paused
from llmjax.system import check_system
from llmjax.version import __version__

if TYPE_CHECKING:
    from llmjax.async_llm import AsyncLLM
    from llmjax.config import EngineConfig, ServerConfig
    from llmjax.conversion import quantize
    from llmjax.inputs import TextPrompt, TokensPrompt
    from llmjax.llm import LLM, generate
    from llmjax.outputs import CompletionOutput, Logprob, RequestOutput
    from llmjax.sampling.params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ServerConfig",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "generate",
    "quantize",
]

# Loaded when first used: ``llmjax --help`` and the settings do not need JAX.
_MODULES = {
    "AsyncLLM": "llmjax.async_llm",
    "CompletionOutput": "llmjax.outputs",
    "EngineConfig": "llmjax.config",
    "LLM": "llmjax.llm",
    "Logprob": "llmjax.outputs",
    "RequestOutput": "llmjax.outputs",
    "RequestOutputKind": "llmjax.sampling.params",
    "SamplingParams": "llmjax.sampling.params",
    "ServerConfig": "llmjax.config",
    "TextPrompt": "llmjax.inputs",
    "TokensPrompt": "llmjax.inputs",
    "generate": "llmjax.llm",
    "quantize": "llmjax.conversion",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'llmjax' has no attribute {name!r}")
    check_system()
    with paused():
        module = importlib.import_module(_MODULES[name])
    return getattr(module, name)
