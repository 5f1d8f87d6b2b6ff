"""Model definitions: data, and Flax NNX modules used as pure functions of a flat dict of weights.

What needs Flax, a quarter of what a start would import, is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmjax.models.classifiers import TokenLabels
from llmjax.models.config import ModelConfig
from llmjax.models.errors import UnsupportedModel
from llmjax.models.graph import ModelGraph
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.convolution import ShortConvolution
from llmjax.models.layers.embedding import LearnedPositions
from llmjax.models.layers.gated_delta import GatedDelta
from llmjax.models.layers.latent import LatentAttention
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.lightning import LightningAttention
from llmjax.models.layers.mamba2 import Mamba2
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.moe import ExpertGroups, Experts, SharedExpert
from llmjax.models.layers.norm import RMS, Layer
from llmjax.models.layers.pooling import Dense, Pooler
from llmjax.models.layers.residual import NormedParts, NormedStream, Parallel, PostNorm, PreNorm, Sandwich
from llmjax.models.layers.rope import RopeConfig
from llmjax.models.nested import text_config, text_name
from llmjax.models.registry import FAMILIES, has_unit_head, makes_vectors, model_config, tensor_names, token_labels

if TYPE_CHECKING:
    from llmjax.models.decoder import CausalLM, Hidden
    from llmjax.models.functional import abstract_model, init_random, merge

__all__ = [
    "FAMILIES",
    "MLP",
    "RMS",
    "Attention",
    "CausalLM",
    "Dense",
    "ExpertGroups",
    "Experts",
    "GatedDelta",
    "GatedMLP",
    "Hidden",
    "LatentAttention",
    "Layer",
    "LayerSpec",
    "LearnedPositions",
    "LightningAttention",
    "Mamba2",
    "ModelConfig",
    "ModelGraph",
    "NormedParts",
    "NormedStream",
    "Parallel",
    "Pooler",
    "PostNorm",
    "PreNorm",
    "RopeConfig",
    "Sandwich",
    "SharedExpert",
    "ShortConvolution",
    "TokenLabels",
    "UnsupportedModel",
    "abstract_model",
    "has_unit_head",
    "init_random",
    "makes_vectors",
    "merge",
    "model_config",
    "tensor_names",
    "text_config",
    "text_name",
    "token_labels",
]

_COMPUTING = {
    "CausalLM": "llmjax.models.decoder",
    "Hidden": "llmjax.models.decoder",
    "abstract_model": "llmjax.models.functional",
    "init_random": "llmjax.models.functional",
    "merge": "llmjax.models.functional",
}


def __getattr__(name: str) -> Any:
    if name not in _COMPUTING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_COMPUTING[name]), name)
