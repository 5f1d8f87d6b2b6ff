"""The short convolution of LFM2 as a mixer: causal, and of each channel by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.shares import Share, channel_groups, inner_share, joined, unknown_axis
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """Gates, a convolution over the last few tokens, and gates again."""

    size: int  # channels; in the whole model as many as the residual stream has
    width: int  # tokens that the convolution sees, the current one included
    bias: bool = False  # of the convolution and of the projections before and after it

    name: ClassVar[str] = "conv"
    rope: ClassVar[None] = None
    projections: ClassVar[Projections] = (("in_proj",), ("out_proj",))

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the last inputs of the convolution."""
        return Recurrent(recent=(self.width - 1, self.size))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes to show to users, by their usual names."""
        return {}

    @property
    def divisible(self) -> int:
        """The number of groups of channels: each device needs at least one."""
        return channel_groups(self.size)

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        channels = inner_share(self.size, devices)
        if axis == "channels":
            return channels
        if axis == "parts":  # parts of equal size
            count = size // self.size
            return joined([channels] * count, [self.size] * count)
        raise unknown_axis(axis)

    def local(self, devices: int) -> ShortConvolution:
        """The part of the mixer that each device has if ``devices`` of them divide it."""
        return replace(self, size=inner_share(self.size, devices).shape[1])
