"""Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692): a recurrent mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmjax.models.layers.norm import RMS
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class ChannelDelta:
    """A state of keys and values of each head that is corrected token by token, and each of whose channels forgets at
    its own rate."""

    heads: int
    head_dim: int  # of queries, keys and values, and the rank of what makes decays and gates
    width: int  # of the causal convolutions over q, k and v: tokens, its own included
    activation: str  # behind the convolutions, a key of ACTIVATIONS
    norm: RMS  # of what a head reads, before the gate

    name: ClassVar[str] = "self_attn"
    rope: ClassVar[None] = None

    @property
    def inner(self) -> int:
        """Entries of all heads."""
        return self.heads * self.head_dim

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the state, and the convolutions' last inputs."""
        return Recurrent(recent=(self.width - 1, 3 * self.inner), memory=(self.heads, self.head_dim, self.head_dim))
