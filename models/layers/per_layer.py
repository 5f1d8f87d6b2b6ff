"""Per-layer embeddings (Gemma 3n and 4): a small vector of each token for each layer, which it is given at its end."""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.models.layers.norm import RMS


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """Vectors of all layers: what a token has for each, and what its embedding gives."""

    size: int  # of a layer's vector
    vocab_size: int
    activation: str  # of the gates in layers, a key of ACTIVATIONS
    norm: RMS
