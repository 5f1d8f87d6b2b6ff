"""Gated delta net (Yang et al. 2024, arXiv:2412.06464) as Qwen3-Next has it: a recurrent mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmjax.models.layers.norm import RMS
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
