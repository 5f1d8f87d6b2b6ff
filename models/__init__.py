"""Model definitions: Flax NNX modules used as pure functions of a flat dict of weights."""

from models.config import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig
from models.decoder import CausalLM, Hidden
from models.errors import UnsupportedModel
from models.functional import abstract_model, init_random, merge
from models.registry import FAMILIES, model_config

__all__ = [
    "FAMILIES",
    "CausalLM",
    "ExpertsConfig",
    "Hidden",
    "LayerConfig",
    "ModelConfig",
    "RopeConfig",
    "UnsupportedModel",
    "abstract_model",
    "init_random",
    "merge",
    "model_config",
]
