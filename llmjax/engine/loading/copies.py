"""Copies of quantized matrices in 16 bits, with which prompts are multiplied on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeAlias

import jax

from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.kernels.offloading import SplitStack
from llmjax.kernels.qtensor import QTensor
from llmjax.platforms import Platform

Weight: TypeAlias = jax.Array | QTensor | SplitStack


def check_copies(config: EngineConfig, platform: Platform) -> None:
    """Checks the setting before anything is loaded.

    Raises:
        ConfigError: copies are wanted where nothing would be multiplied with them.
    """
    if not config.dequantized_copies:
        return
    if not platform.is_cuda:
        raise ConfigError(
            f"dequantized_copies: steps on {platform.device} multiply with quantized matrices themselves; it is for "
            "NVIDIA GPUs"
        )
    if len(platform.devices) > 1:
        raise ConfigError("dequantized_copies: matrices that several devices divide have no copies yet")


def with_copies(params: Mapping[str, Weight], *, without: Collection[str]) -> dict[str, Weight]:
    """The weights, each quantized matrix with a copy in its dtype.

    Stacks of experts have none: a step reads of them only those that its tokens chose. Nor have matrices whose codes
    are multiplied as they are, with x in 8-bit floats.

    Args:
        params: the weights by name.
        without: names of weights that few rows are multiplied with, as those of the head.
    """
    return {name: weight if name in without else _with_copy(weight) for name, weight in params.items()}


def _with_copy(weight: Weight) -> Weight:
    if not isinstance(weight, QTensor) or weight.words.ndim != 3 or weight.activations == "fp8":
        return weight
    return replace(weight, copy=_copied(weight))


@jax.jit
def _copied(weight: QTensor) -> jax.Array:
    return weight.dequantize().astype(weight.dtype)
