"""Mamba (Gu and Dao 2023, arXiv:2312.00752): a state space of each channel whose steps depend on the tokens, as a
recurrent mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmjax.models.layers.norm import RMS
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Channels with a state each, written with (B) and read with (C) vectors that all channels share."""

    inner: int  # channels
    state_dim: int  # entries of a channel's state, of B and of C
    rank: int  # of the matrix that makes steps
    width: int  # of the causal convolution: tokens, its own included
    activation: str  # behind the convolution, a key of ACTIVATIONS
    norm: RMS | None  # of what steps are made of, B and C, each its own; None: there is none
    conv_bias: bool = True
    bias: bool = False  # of the first and the last product

    name: ClassVar[str] = "mamba"
    rope: ClassVar[None] = None

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the states, and the convolution's last inputs."""
        return Recurrent(recent=(self.width - 1, self.inner), memory=(1, self.state_dim, self.inner))
