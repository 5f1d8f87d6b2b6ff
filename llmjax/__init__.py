"""LLM inference on JAX/XLA: ``LLM``, ``AsyncLLM``, ``generate``, ``quantize``, ``SamplingParams`` and their outputs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmjax.collector import paused
from llmjax.system import check_system
from llmjax.version import __version__

if TYPE_CHECKING:
    from llmjax.adapters.request import LoRARequest
    from llmjax.async_llm import AsyncLLM
    from llmjax.config import EngineConfig, ServerConfig
    from llmjax.conversion import quantize
    from llmjax.engine.front.pairs import TextPair
    from llmjax.inputs import TextPrompt, TokensPrompt
    from llmjax.llm import LLM, generate
    from llmjax.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from llmjax.pooling_params import PoolingParams
    from llmjax.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
    from llmjax.sampling.structured import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ServerConfig",
    "StructuredOutputsParams",
    "TextPair",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "generate",
    "quantize",
]

# Loaded when first used: ``llmjax --help`` and the settings do not need JAX.
_MODULES = {
    "AsyncLLM": "llmjax.async_llm",
    "BeamSearchOutput": "llmjax.outputs",
    "BeamSearchParams": "llmjax.sampling.params",
    "BeamSearchSequence": "llmjax.outputs",
    "ClassificationOutput": "llmjax.outputs",
    "ClassificationRequestOutput": "llmjax.outputs",
    "CompletionOutput": "llmjax.outputs",
    "EmbeddingOutput": "llmjax.outputs",
    "EmbeddingRequestOutput": "llmjax.outputs",
    "EngineConfig": "llmjax.config",
    "GuidedDecodingParams": "llmjax.sampling.structured",
    "LLM": "llmjax.llm",
    "LoRARequest": "llmjax.adapters.request",
    "Logprob": "llmjax.outputs",
    "PoolingOutput": "llmjax.outputs",
    "PoolingParams": "llmjax.pooling_params",
    "PoolingRequestOutput": "llmjax.outputs",
    "RequestOutput": "llmjax.outputs",
    "RequestOutputKind": "llmjax.sampling.params",
    "SamplingParams": "llmjax.sampling.params",
    "ScoringOutput": "llmjax.outputs",
    "ScoringRequestOutput": "llmjax.outputs",
    "ServerConfig": "llmjax.config",
    "StructuredOutputsParams": "llmjax.sampling.structured",
    "TextPair": "llmjax.engine.front.pairs",
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
