"""Gated delta net (Yang et al. 2024, arXiv:2412.06464) of Qwen3-Next: a recurrent mixer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.shares import Share, even_share, joined, of_entries, unknown_axis
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Linear attention with a state that decays and that every token corrects; ``value_heads / key_heads`` states share
    a query and a key."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # tokens that the causal convolution over q, k and v sees, the current one included
    activation: str  # activation after the convolution, a key of ACTIVATIONS
    norm: RMS  # norm of what a head reads, before the gate
    in_turn: bool = False  # one projection each for q, k, v and gates; False: two fused ones, by key head

    name: ClassVar[str] = "linear_attn"
    rope: ClassVar[None] = None
    projections: ClassVar[Projections] = (
        ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        ("out_proj",),
    )

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the state, and the last inputs of the convolution."""
        return Recurrent(
            recent=(self.width - 1, self.channels), memory=(self.value_heads, self.key_dim, self.value_dim)
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes to show to users, by their usual names."""
        return {"recurrent heads": self.value_heads}

    @property
    def divisible(self) -> int:
        """The number of key heads: each device needs at least one."""
        return self.key_heads

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        heads = even_share(self.key_heads, devices)
        if axis == "heads":
            return of_entries(heads, size // self.key_heads)
        if axis == "channels":  # the whole has the queries, keys and values of all heads one after another
            sizes = (self.key_dim, self.key_dim, self.value_heads // self.key_heads * self.value_dim)
            return joined([of_entries(heads, each) for each in sizes], [self.key_heads * each for each in sizes])
        raise unknown_axis(axis)

    def local(self, devices: int) -> GatedDelta:
        """The part of the mixer that each device has if ``devices`` of them divide it."""
        heads = even_share(self.key_heads, devices).shape[1]
        return replace(self, key_heads=heads, value_heads=self.value_heads // self.key_heads * heads)
