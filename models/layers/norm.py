"""The specs of norms, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RMS:
    """Root mean square norm; see ``llmjax.kernels.norm.Norm``."""

    eps: float
    plus_one: bool = False  # weights are stored as w and applied as 1 + w, with the product in f32 (Gemma)
    weighted: bool = True


@dataclass(frozen=True)
class Layer:
    """LayerNorm, which also subtracts the mean; see ``llmjax.kernels.norm.layer_norm``."""

    eps: float
    bias: bool = True
    plus_one: bool = False  # weights are stored as w and applied as 1 + w (Nemotron)
    weighted: bool = True


NormSpec = RMS | Layer
