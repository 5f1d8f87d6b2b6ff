"""Lightning attention (Qin et al. 2024, arXiv:2401.04658): linear attention with a fixed decay for each head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.shares import Share, even_share, of_entries, unknown_axis
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class LightningAttention:
    """Linear attention: a head's state is a decaying sum of the products of keys and values."""

    heads: int
    head_dim: int
    activation: str  # activation of queries, keys and values, a key of ACTIVATIONS
    norm: RMS  # norm of what all heads read, before the gate
    decay: float  # head h, counted from 1, keeps ``exp(-decay 2**(-8 h / heads))`` of its state from token to token
    whole: int | None = None  # heads of all devices, in a device's part; None: this has all heads

    name: ClassVar[str] = "self_attn"
    rope: ClassVar[None] = None
    projections: ClassVar[Projections] = (("qkv_proj", "output_gate"), ("out_proj",))

    @property
    def state(self) -> Recurrent:
        """What a layer keeps."""
        return Recurrent(memory=(self.heads, self.head_dim, self.head_dim))

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
        if axis == "heads":
            return of_entries(even_share(self.heads, devices), size // self.heads)
        raise unknown_axis(axis)

    def local(self, devices: int) -> LightningAttention:
        """The part of the mixer that each device has if ``devices`` of them divide it."""
        return replace(self, heads=even_share(self.heads, devices).shape[1], whole=self.heads)
