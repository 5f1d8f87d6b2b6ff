"""Gated delta net (Yang et al. 2024, arXiv:2412.06464) as Qwen3-Next has it: a recurrent mixer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.shares import Share, even_share, joined, of_entries, unknown_axis
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """A state of keys and values that forgets and is corrected token by token; ``value_heads / key_heads`` states
    share a query and a key."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # of the causal convolution over q, k and v: tokens, its own included
    activation: str  # behind the convolution, a key of ACTIVATIONS
    norm: RMS  # of what a head reads, before the gate
    in_turn: bool = False  # products before the convolution are one each, of all heads; else two, key head by key head

    name: ClassVar[str] = "linear_attn"
    rope: ClassVar[None] = None
    projections: ClassVar[Projections] = (
        ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        ("out_proj",),
    )

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the state, and the convolution's last inputs."""
        return Recurrent(
            recent=(self.width - 1, self.channels), memory=(self.value_heads, self.key_dim, self.value_dim)
        )

    @property
    def sizes(self) -> dict[str, int]:
        """What people ask about it, by what they call it."""
        return {"recurrent heads": self.value_heads}

    @property
    def divisible(self) -> int:
        """Key heads, of which each device needs one."""
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
        """The mixer of each of so many devices."""
        heads = even_share(self.key_heads, devices).shape[1]
        return replace(self, key_heads=heads, value_heads=self.value_heads // self.key_heads * heads)
