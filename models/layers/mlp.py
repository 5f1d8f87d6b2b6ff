"""The feed-forward half of a layer: gated (Shazeer 2020, arXiv:2002.05202) or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmjax.models.layers.norm import RMS

XIELU = "xielu"
"""An activation with parameters of its own (Huang and Schlag 2024, arXiv:2411.13010)."""


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """``down(activation(gate(n)) * up(n))``."""

    inner: int  # size of what ``down`` is given
    activation: str  # a key of ACTIVATIONS
    bias: bool = False
    down_bias: bool | None = None  # of ``down``, where it is not as the others
    gate_scale: float = 1.0  # of what the activation is given
    down_norm: RMS | None = None  # of what ``down`` is given
    whole: int | None = None  # what ``inner`` is for all devices, where one has a part; None: it has all
    cutoff: float | None = None  # of a token's gates, in standard deviations above their mean: only what exceeds it is
    # activated, less the cutoff (Gemma 3n)

    name: ClassVar[str] = "mlp"


@dataclass(frozen=True, kw_only=True)
class MLP:
    """``down(activation(up(n)))`` (Vaswani et al. 2017, arXiv:1706.03762, section 3.3)."""

    inner: int  # size of what ``down`` is given
    activation: str  # a key of ACTIVATIONS, or XIELU
    bias: bool = True

    name: ClassVar[str] = "mlp"
