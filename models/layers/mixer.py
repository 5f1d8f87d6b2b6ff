"""What all mixers answer for themselves, so that nobody else asks which one it is."""

from __future__ import annotations

from typing import Protocol

from llmjax.models.layers.rope import RopeConfig
from llmjax.models.layers.shares import Share
from llmjax.models.layers.state import StateKind

Projections = tuple[tuple[str, ...], ...]


class Mixer(Protocol):
    """The spec of the sublayer that mixes tokens: attention, a state space, a convolution."""

    @property
    def name(self) -> str:
        """The attribute that checkpoints use, such as ``self_attn``."""

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary embedding; None: there is none."""

    @property
    def state(self) -> StateKind:
        """What a layer keeps from step to step."""

    @property
    def projections(self) -> Projections:
        """Linear layers in the order in which they are computed, those with the same input together.

        The first ones are given what the layer's norm makes. A layer may lack some of them.
        """

    @property
    def sizes(self) -> dict[str, int]:
        """What people ask about it, by what they call it."""

    @property
    def divisible(self) -> int:
        """How many devices may divide it at most."""

    def share(self, axis: str, size: int, devices: int) -> Share:
        """Which entries each device has of an axis of a parameter.

        Args:
            axis: its logical name: ``heads``, ``kv_heads``, ``channels``, or ``parts``, one after another.
            size: entries of the whole.
            devices: that divide the model.

        Raises:
            ValueError: no parameter has such an axis.
        """

    def local(self, devices: int) -> Mixer:
        """The mixer of each of so many devices."""
