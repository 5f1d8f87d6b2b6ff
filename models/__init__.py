"""Model definitions: Flax NNX modules used as pure functions of a flat dict of weights."""

from llmjax.models.config import ModelConfig
from llmjax.models.decoder import CausalLM, Hidden
from llmjax.models.errors import UnsupportedModel
from llmjax.models.functional import abstract_model, init_random, merge
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.gated_delta import GatedDelta
from llmjax.models.layers.latent import LatentAttention
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.layers.moe import ExpertGroups, Experts, SharedExpert
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.residual import PreNorm, Sandwich
from llmjax.models.layers.rope import RopeConfig
from llmjax.models.registry import FAMILIES, model_config

__all__ = [
    "FAMILIES",
    "RMS",
    "Attention",
    "CausalLM",
    "ExpertGroups",
    "Experts",
    "GatedDelta",
    "GatedMLP",
    "Hidden",
    "LatentAttention",
    "LayerSpec",
    "ModelConfig",
    "PreNorm",
    "RopeConfig",
    "Sandwich",
    "SharedExpert",
    "UnsupportedModel",
    "abstract_model",
    "init_random",
    "merge",
    "model_config",
]
