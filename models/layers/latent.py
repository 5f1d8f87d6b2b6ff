"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): a token keeps one vector that all heads share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.norm import RMS, Layer
from llmjax.models.layers.rope import RopeConfig
from llmjax.models.layers.shares import Share, even_share, of_entries, unknown_axis
from llmjax.models.layers.state import LatentKV


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values are projections of a latent vector; positions are in entries of their own."""

    heads: int
    q_rank: int | None  # size of the queries' latent vector; None: queries are projected from the residual stream
    kv_rank: int  # size of the latent vector
    nope_dim: int  # entries of a query that meet the latent vector
    rope_dim: int  # entries of a query that meet the rotated key, which all heads share
    value_dim: int
    scale: float  # of the logits
    rope: RopeConfig | None  # of ``rope_dim`` entries; None: they are not rotated
    norm: RMS  # of the latent vectors
    bias: bool = False  # of what makes latent vectors, and of o

    name: ClassVar[str] = "self_attn"
    projections: ClassVar[Projections] = (
        ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
        ("q_b_proj",),
        ("kv_b_proj",),
        ("o_proj",),
    )

    @property
    def state(self) -> LatentKV:
        """What a layer keeps: the latent vector, normed, and the rotated key."""
        return LatentKV(dim=self.kv_rank + self.rope_dim, value_dim=self.kv_rank)

    @property
    def sizes(self) -> dict[str, int]:
        """What people ask about it, by what they call it."""
        return {"heads": self.heads}

    @property
    def divisible(self) -> int:
        """Heads, of which each device needs one."""
        return self.heads

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        if axis == "heads":
            return of_entries(even_share(self.heads, devices), size // self.heads)
        raise unknown_axis(axis)

    def local(self, devices: int) -> LatentAttention:
        """The mixer of each of so many devices."""
        return replace(self, heads=even_share(self.heads, devices).shape[1])


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """What chooses the keys that latent attention looks at (DeepSeek-V3.2, arXiv:2512.02556): those that small queries
    score highest. It stands beside the mixer, and its keys are stored beside the latent vectors."""

    heads: int
    size: int  # of a query and a key
    q_rank: int  # size of the mixer's latent queries, of which its own are made
    count: int  # keys that a token sees at most
    rope: RopeConfig  # of the first entries
    norm: Layer  # of keys

    name: ClassVar[str] = "indexer"

    @property
    def state(self) -> LatentKV:
        """What a layer keeps."""
        return LatentKV(dim=self.size, value_dim=self.size)
