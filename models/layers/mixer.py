"""The interface of mixers: each describes itself, so that no other module asks which kind it is."""

from __future__ import annotations

from typing import Protocol

from llmjax.models.layers.rope import RopeConfig
from llmjax.models.layers.shares import Share
from llmjax.models.layers.state import StateKind

Projections = tuple[tuple[str, ...], ...]


class Mixer(Protocol):
    """The spec of the sublayer that mixes tokens: attention, a state space or a convolution."""

    @property
    def name(self) -> str:
        """The module's name in checkpoints, such as ``self_attn``."""

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary embedding; None: there is none."""

    @property
    def state(self) -> StateKind:
        """What a layer keeps from step to step."""

    @property
    def projections(self) -> Projections:
        """Names of linear layers in the order in which they are computed, those with the same input together.

        The input of the first ones is the output of the layer's norm. A layer may lack some of them.
        """

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes to show to users, by their usual names."""

    @property
    def divisible(self) -> int:
        """The most devices that can divide it."""

    def share(self, axis: str, size: int, devices: int) -> Share:
        """The entries of an axis of a parameter that each device has.

        Args:
            axis: logical name of the axis: ``heads``, ``kv_heads``, ``channels``, or ``parts`` (several, one after
                another).
            size: entries of the axis in the whole model.
            devices: number of devices that divide the model.

        Raises:
            ValueError: no parameter has such an axis.
        """

    def local(self, devices: int) -> Mixer:
        """The part of the mixer that each device has if ``devices`` of them divide it."""
