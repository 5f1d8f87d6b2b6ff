"""Model definitions: data, and Flax NNX modules used as pure functions of a flat dict of weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmjax.models.classifiers import TokenLabels
    from llmjax.models.config import ModelConfig
    from llmjax.models.decoder import CausalLM, Hidden
    from llmjax.models.errors import UnsupportedModel
    from llmjax.models.functional import abstract_model, init_random, merge
    from llmjax.models.graph import ModelGraph
    from llmjax.models.layers.attention import Attention
    from llmjax.models.layers.channel_delta import ChannelDelta
    from llmjax.models.layers.convolution import ShortConvolution
    from llmjax.models.layers.embedding import LearnedPositions
    from llmjax.models.layers.gated_delta import GatedDelta
    from llmjax.models.layers.latent import LatentAttention
    from llmjax.models.layers.layer import LayerSpec
    from llmjax.models.layers.lightning import LightningAttention
    from llmjax.models.layers.mamba import Mamba
    from llmjax.models.layers.mamba2 import Mamba2
    from llmjax.models.layers.mlp import MLP, GatedMLP
    from llmjax.models.layers.moe import ExpertGroups, Experts, SharedExpert
    from llmjax.models.layers.norm import RMS, Layer
    from llmjax.models.layers.pooling import Dense, Pooler
    from llmjax.models.layers.residual import NormedParts, NormedStream, Parallel, PostNorm, PreNorm, Sandwich
    from llmjax.models.layers.rope import RopeConfig
    from llmjax.models.nested import text_config, text_name, unwrapped
    from llmjax.models.registry import has_unit_head, makes_vectors, model_config, tensor_names, token_labels

__all__ = [
    "MLP",
    "RMS",
    "Attention",
    "CausalLM",
    "ChannelDelta",
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
    "Mamba",
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
    "unwrapped",
]

# Loaded when first used: a server whose engine is in a process of its own needs no JAX, and a warm start no Flax.
_MODULES = {
    "MLP": "llmjax.models.layers.mlp",
    "RMS": "llmjax.models.layers.norm",
    "Attention": "llmjax.models.layers.attention",
    "CausalLM": "llmjax.models.decoder",
    "ChannelDelta": "llmjax.models.layers.channel_delta",
    "Dense": "llmjax.models.layers.pooling",
    "ExpertGroups": "llmjax.models.layers.moe",
    "Experts": "llmjax.models.layers.moe",
    "GatedDelta": "llmjax.models.layers.gated_delta",
    "GatedMLP": "llmjax.models.layers.mlp",
    "Hidden": "llmjax.models.decoder",
    "LatentAttention": "llmjax.models.layers.latent",
    "Layer": "llmjax.models.layers.norm",
    "LayerSpec": "llmjax.models.layers.layer",
    "LearnedPositions": "llmjax.models.layers.embedding",
    "LightningAttention": "llmjax.models.layers.lightning",
    "Mamba": "llmjax.models.layers.mamba",
    "Mamba2": "llmjax.models.layers.mamba2",
    "ModelConfig": "llmjax.models.config",
    "ModelGraph": "llmjax.models.graph",
    "NormedParts": "llmjax.models.layers.residual",
    "NormedStream": "llmjax.models.layers.residual",
    "Parallel": "llmjax.models.layers.residual",
    "Pooler": "llmjax.models.layers.pooling",
    "PostNorm": "llmjax.models.layers.residual",
    "PreNorm": "llmjax.models.layers.residual",
    "RopeConfig": "llmjax.models.layers.rope",
    "Sandwich": "llmjax.models.layers.residual",
    "SharedExpert": "llmjax.models.layers.moe",
    "ShortConvolution": "llmjax.models.layers.convolution",
    "TokenLabels": "llmjax.models.classifiers",
    "UnsupportedModel": "llmjax.models.errors",
    "abstract_model": "llmjax.models.functional",
    "has_unit_head": "llmjax.models.registry",
    "init_random": "llmjax.models.functional",
    "makes_vectors": "llmjax.models.registry",
    "merge": "llmjax.models.functional",
    "model_config": "llmjax.models.registry",
    "tensor_names": "llmjax.models.registry",
    "text_config": "llmjax.models.nested",
    "text_name": "llmjax.models.nested",
    "unwrapped": "llmjax.models.nested",
    "token_labels": "llmjax.models.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
