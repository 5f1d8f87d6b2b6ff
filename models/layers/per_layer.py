"""Per-layer embeddings (Gemma 3n and 4): a small vector of each token for each layer, used at the layer's end."""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.models.layers.norm import RMS


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """The vectors of all layers: each is an embedding of the token plus a projection of its main embedding."""

    size: int  # size of a layer's vector
    vocab_size: int
    activation: str  # activation of the layers' gates, a key of ACTIVATIONS
    norm: RMS
    unknown: int = 0  # the token whose embedding rows of pictures have
