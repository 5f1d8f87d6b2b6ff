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
    """Linear attention with a state for each head that every token corrects, and a decay rate for each channel."""

    heads: int
    head_dim: int  # size of queries, keys and values, and rank of the decay and gate projections
    width: int  # tokens that the causal convolutions over q, k and v see, the current one included
    activation: str  # activation after the convolutions, a key of ACTIVATIONS
    norm: RMS  # norm of what a head reads, before the gate

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
        """Size of all heads together."""
        return self.heads * self.head_dim

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the state, and the last inputs of the convolutions."""
        return Recurrent(recent=(self.width - 1, 3 * self.inner), memory=(self.heads, self.head_dim, self.head_dim))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes to show to users, by their usual names."""
        return {"recurrent heads": self.heads}

    @property
    def divisible(self) -> int:
        """The number of heads: each device needs at least one."""
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
        """The part of the mixer that each device has if ``devices`` of them divide it."""
        return replace(self, heads=even_share(self.heads, devices).shape[1])
