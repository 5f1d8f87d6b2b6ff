"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): all heads share one KV vector for each token."""

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
    """Attention whose keys and values are projections of a latent vector; rope applies to separate entries."""

    heads: int
    q_rank: int | None  # size of the queries' latent vector; None: queries are projected directly
    kv_rank: int  # size of the latent vector of keys and values
    nope_dim: int  # entries of a head's query without rope
    rope_dim: int  # entries of a head's query with rope; their key is shared by all heads
    value_dim: int
    scale: float  # factor of the attention logits
    rope: RopeConfig | None  # rope of the ``rope_dim`` entries; None: they are not rotated
    norm: RMS  # norm of the latent vectors
    bias: bool = False  # of the projections to latent vectors, and of o

    name: ClassVar[str] = "self_attn"
    projections: ClassVar[Projections] = (
        ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
        ("q_b_proj",),
        ("kv_b_proj",),
        ("o_proj",),
    )

    @property
    def state(self) -> LatentKV:
        """What a layer keeps: the normed latent vector and the rotated key."""
        return LatentKV(dim=self.kv_rank + self.rope_dim, value_dim=self.kv_rank)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes to show to users, by their usual names."""
        return {"heads": self.heads}

    @property
    def divisible(self) -> int:
        """The number of heads: each device needs at least one."""
        return self.heads

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        if axis == "heads":
            return of_entries(even_share(self.heads, devices), size // self.heads)
        raise unknown_axis(axis)

    def local(self, devices: int) -> LatentAttention:
        """The part of the mixer that each device has if ``devices`` of them divide it."""
        return replace(self, heads=even_share(self.heads, devices).shape[1])


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Chooses the keys that latent attention reads, by the scores of small queries (DeepSeek-V3.2, arXiv:2512.02556).

    It belongs to the layer, beside the mixer; its own keys are stored beside the latent vectors.
    """

    heads: int
    size: int  # size of a query and of a key
    q_rank: int  # size of the mixer's latent queries, from which its own are projected
    count: int  # the most keys that a token sees
    rope: RopeConfig  # rope of the first entries
    norm: Layer  # norm of the keys

    name: ClassVar[str] = "indexer"

    @property
    def state(self) -> LatentKV:
        """What a layer keeps."""
        return LatentKV(dim=self.size, value_dim=self.size)
