"""Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692): a recurrent mixer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.shares import Share, even_share, of_entries, unknown_axis
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
    projections: ClassVar[Projections] = (
        ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj"),
        ("f_b_proj",),
        ("g_b_proj",),
        ("o_proj",),
    )

    @property
    def inner(self) -> int:
        """Entries of all heads."""
        return self.heads * self.head_dim

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the state, and the convolutions' last inputs."""
        return Recurrent(recent=(self.width - 1, 3 * self.inner), memory=(self.heads, self.head_dim, self.head_dim))

    @property
    def sizes(self) -> dict[str, int]:
        """What people ask about it, by what they call it."""
        return {"recurrent heads": self.heads}

    @property
    def divisible(self) -> int:
        """Heads, of which each device needs one."""
        return self.heads

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        heads = even_share(self.heads, devices)
        if axis == "heads":
            return of_entries(heads, size // self.heads)
        if axis == "channels":
            return of_entries(heads, self.head_dim)
        raise unknown_axis(axis)

    def local(self, devices: int) -> ChannelDelta:
        """The mixer of each of so many devices."""
        return replace(self, heads=even_share(self.heads, devices).shape[1])
