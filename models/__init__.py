"""Model definitions: Flax NNX modules used as pure functions of a flat dict of weights."""

from llmjax.models.classifiers import TokenLabels
from llmjax.models.config import ModelConfig
from llmjax.models.decoder import CausalLM, Hidden
from llmjax.models.errors import UnsupportedModel
from llmjax.models.functional import abstract_model, init_random, merge
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
