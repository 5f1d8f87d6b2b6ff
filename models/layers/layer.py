"""A decoder layer as data."""

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
    """What one layer is made of; layers with equal specs are traced and compiled once."""

    mixer: Mixer
    feed_forward: FeedForward | None  # None: the mixer is all, and ``residual`` has no norms for a second half
    norm: NormSpec
    residual: Residual = field(default_factory=PreNorm)
    state_of: int | None = None  # the layer, before this one, whose keys and values it reads; None: it has its own
    per_layer: PerLayer | None = None  # what is given to it at its end
    scaled: bool = False  # what leaves it is multiplied by a number
    beside: Mixer | None = None  # a second mixer, see `TwoMixers`, with a state of its own
    indexer: Indexer | None = None  # what chooses the keys that the mixer looks at, with a state of its own
    chosen_before: bool = False  # the mixer looks at the keys that the last indexer before it has chosen
    altup: AltUp | None = None  # how it updates several residual streams; None: there is one
    low_rank: LowRank | None = None  # what is added to what attention leaves, with which it is divided by sqrt(2)

    @property
    def other(self) -> Mixer | Indexer | None:
        """What has a state beside the mixer's."""
        return self.beside or self.indexer
