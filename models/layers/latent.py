"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): a token keeps one vector that all heads share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmjax.models.layers.norm import RMS
from llmjax.models.layers.rope import RopeConfig
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
    rope: RopeConfig  # of ``rope_dim`` entries
    norm: RMS  # of the latent vectors
    bias: bool = False  # of what makes latent vectors, and of o

    name: ClassVar[str] = "self_attn"

    @property
    def state(self) -> LatentKV:
        """What a layer keeps: the latent vector, normed, and the rotated key."""
        return LatentKV(dim=self.kv_rank + self.rope_dim, value_dim=self.kv_rank)
