"""A causal convolution of each channel by itself: what recurrent mixers begin with, and a mixer of its own (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """Gates, a convolution over the last few tokens, and gates again."""

    size: int  # channels: of the whole model, those of the residual stream
    width: int  # tokens that the convolution sees, its own included
    bias: bool = False  # of the convolution and of the products before and behind it

    name: ClassVar[str] = "conv"
    rope: ClassVar[None] = None

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the convolution's last inputs."""
        return Recurrent(recent=(self.width - 1, self.size))
