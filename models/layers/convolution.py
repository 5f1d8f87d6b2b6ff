"""A causal convolution of each channel by itself: what recurrent mixers begin with, and a mixer of its own (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.shares import Share, channel_groups, inner_share, joined, unknown_axis
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """Gates, a convolution over the last few tokens, and gates again."""

    size: int  # channels: of the whole model, those of the residual stream
    width: int  # tokens that the convolution sees, its own included
    bias: bool = False  # of the convolution and of the products before and behind it

    name: ClassVar[str] = "conv"
    rope: ClassVar[None] = None
    projections: ClassVar[Projections] = (("in_proj",), ("out_proj",))

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the convolution's last inputs."""
        return Recurrent(recent=(self.width - 1, self.size))

    @property
    def sizes(self) -> dict[str, int]:
        """What people ask about it, by what they call it."""
        return {}

    @property
    def divisible(self) -> int:
        """Groups of channels, of which each device needs one."""
        return channel_groups(self.size)

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        channels = inner_share(self.size, devices)
        if axis == "channels":
            return channels
        if axis == "parts":  # of one size
            count = size // self.size
            return joined([channels] * count, [self.size] * count)
        raise unknown_axis(axis)

    def local(self, devices: int) -> ShortConvolution:
        """The mixer of each of so many devices."""
        return replace(self, size=inner_share(self.size, devices).shape[1])
