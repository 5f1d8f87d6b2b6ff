"""The spec of a decoder layer, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmjax.models.layers.altup import AltUp, LowRank
from llmjax.models.layers.latent import Indexer
from llmjax.models.layers.mixer import Mixer
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.moe import Experts
from llmjax.models.layers.norm import NormSpec
from llmjax.models.layers.per_layer import PerLayer
from llmjax.models.layers.residual import PreNorm, Residual

FeedForward = GatedMLP | MLP | Experts


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The parts of one layer; layers with equal specs are traced and compiled once."""

    mixer: Mixer
    feed_forward: FeedForward | None  # None: the layer is only a mixer, and ``residual`` has no norms for another
    norm: NormSpec
    residual: Residual = field(default_factory=PreNorm)
    state_of: int | None = None  # the earlier layer whose keys and values it reads; None: it has its own
    per_layer: PerLayer | None = None  # per-layer embedding, added at the end of the layer
    scaled: bool = False  # whether its output is multiplied by a learned number
    beside: Mixer | None = None  # a second mixer, see `TwoMixers`, with a state of its own
    indexer: Indexer | None = None  # chooses the keys that the mixer reads, with a state of its own
    in_order: bool = False  # a picture's tokens see no later ones in it, whatever they do in other layers (Gemma 4)
    chosen_before: bool = False  # the mixer reads the keys that the last indexer before it has chosen
    altup: AltUp | None = None  # how it updates several residual streams; None: there is one
    low_rank: LowRank | None = None  # path around attention; the sum of both is divided by sqrt(2)

    @property
    def other(self) -> Mixer | Indexer | None:
        """The part with a second state, if any: another mixer or an indexer."""
        return self.beside or self.indexer
