"""What an engine needs of its machine, worked out before any of its weights is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmjax.config import EngineConfig
from llmjax.engine.loading.memory import plan_kv, step_bytes
from llmjax.engine.need import CARD, Need
from llmjax.kernels.attention import KVLayout
from llmjax.models.config import ModelConfig
from llmjax.platforms import CUDA_NAMES, Platform, cuda_plugin

# Interpreter, JAX, C++ library and compiled programs, as private memory of the process of a model of two layers.
PROCESS_BYTES = 384 * 2**20
CARD_PROCESS_BYTES = 3 * 2**30  # with CUDA's libraries, and the two largest weights on their way to the card
GIB = 2**30

Admit = Callable[[Need], None]


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A model of which all but the weights has been read.

    Args:
        model: the part of it that is in this process.
        weight_bytes: bytes of its weights, as they will be kept, and of its places for adapters, on all devices.
        calibrated: whether its KV scales are calibrated.
    """

    model: ModelConfig
    weight_bytes: int
    calibrated: bool


def for_vectors(config: EngineConfig, model: ModelConfig, platform: Platform) -> EngineConfig:
    """The configuration with what follows where a text has to be in one step: any that the model takes fits into it,
    and its keys, which leave with the step, are as exact as everything else."""
    if model.causal:
        return config
    longest = config.max_model_len or model.max_position
    if config.kv_cache_dtype == "auto":
        config = config.replace(kv_cache_dtype=str(platform.activation_dtype))
    return config.replace(max_num_batched_tokens=max(config.max_num_batched_tokens, longest))


def opens_card(config: EngineConfig) -> bool:
    """Whether the engine is going to open an NVIDIA GPU, which takes a part of its memory at once."""
    return config.device in CUDA_NAMES or (config.device == "auto" and cuda_plugin() is not None)


def card_need(config: EngineConfig) -> Need:
    """What an engine on accelerators needs."""
    host = CARD_PROCESS_BYTES + int(config.kv_offloading_size * GIB)
    cards = dict.fromkeys(config.device_numbers, int(config.gpu_memory_utilization * CARD))
    return Need(weight_bytes=host, kv_bytes=0, other_bytes=0, cards=cards)


def memory_need(config: EngineConfig, unread: Unread, platform: Platform, *, budget: int) -> Need:
    """What an engine on a CPU needs.

    Args:
        config: the settings, in which the sizes of steps are filled in.
        budget: bytes that there are for all engines together.

    Raises:
        ConfigError: not even one request would fit, however much the others gave back.
    """
    config = for_vectors(config, unread.model, platform)
    layout = KVLayout.of(
        platform.kv_dtype(config.kv_cache_dtype), page_size=config.page_size, calibrated=unread.calibrated
    )
    other = step_bytes(config, unread.model) + PROCESS_BYTES + int(config.kv_offloading_size * GIB)
    free = max(0, budget - unread.weight_bytes - other)
    plan = plan_kv(config, unread.model, platform, layout=layout, free=free)
    return Need(weight_bytes=unread.weight_bytes, kv_bytes=plan.num_bytes, other_bytes=other)
