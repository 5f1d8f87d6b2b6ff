"""Model definitions: Flax NNX modules used as pure functions of a flat dict of weights."""

from llmjax.models.config import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig
from llmjax.models.decoder import CausalLM, Hidden
from llmjax.models.errors import UnsupportedModel
from llmjax.models.functional import abstract_model, init_random, merge
from llmjax.models.registry import FAMILIES, model_config

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
