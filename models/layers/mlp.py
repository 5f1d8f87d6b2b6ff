"""The feed-forward sublayer of a layer: gated (Shazeer 2020, arXiv:2002.05202) or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmjax.models.layers.norm import RMS

XIELU = "xielu"
"""An activation with parameters of its own (Huang and Schlag 2024, arXiv:2411.13010)."""


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """``down(activation(gate(n)) * up(n))``."""

    inner: int  # input size of ``down``
    activation: str  # a key of ACTIVATIONS
    bias: bool = False
    down_bias: bool | None = None  # whether ``down`` has a bias, if it differs from the others
    gate_scale: float = 1.0  # factor of the activation's input
    down_norm: RMS | None = None  # norm of the input of ``down``
    whole: int | None = None  # ``inner`` of all devices together, in a device's part; None: this has all
    cutoff: float | None = None  # in standard deviations of a token's gates above their mean: it is subtracted, and
    # only what is left above zero is activated (Gemma 3n)

    name: ClassVar[str] = "mlp"


@dataclass(frozen=True, kw_only=True)
class MLP:
    """``down(activation(up(n)))`` (Vaswani et al. 2017, arXiv:1706.03762, section 3.3)."""

    inner: int  # input size of ``down``
    activation: str  # a key of ACTIVATIONS, or XIELU
    bias: bool = True

    name: ClassVar[str] = "mlp"
