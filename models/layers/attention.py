"""Grouped-query attention over paged keys and values (Ainslie et al. 2023, arXiv:2305.13245)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from llmjax.models.layers.chunks import Sharpening
from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.norm import RMS, NormSpec
from llmjax.models.layers.picture import Picture
from llmjax.models.layers.rope import RopeConfig
from llmjax.models.layers.shares import NOTHING, HeadShares, Share, of_entries, unknown_axis
from llmjax.models.layers.state import PagedKV


@dataclass(frozen=True)
class DividedHeads:
    """One device's heads in a model whose QK norm goes over the heads of all devices."""

    heads: int  # query heads of all devices
    kv_heads: int
    counted: tuple[float, ...]  # weight of each device's key heads in the sum of squares, one device after another:
    # a head that several devices have counts once in all, and padding counts 0


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Softmax attention; ``heads / kv_heads`` queries share a key and a value."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # factor of the attention logits
    rope: RopeConfig | None
    window: int | None = None  # keys that a query sees, its own included; None: all before it
    causal: bool = True  # False: a query also sees as many keys after it; a text must then be in one step
    softcap: float | None = None  # softcap of the attention logits
    qk_norm: NormSpec | None = None  # norm of q and k
    qk_norm_over: Literal["head", "each head", "all heads"] = "head"  # a weight shared by heads, one each, or one norm
    qk_norm_first: bool = True  # before rope
    qkv_bias: bool = False
    o_bias: bool = False
    clip: float | None = None  # largest absolute value of entries of q, k and v
    slopes: tuple[float, ...] | None = None  # ALiBi slopes of the heads; in a device's part, of all devices' heads
    sinks: bool = False  # each head's softmax has one more logit, which is learned and has no value
    gated: bool = False  # a head's output is multiplied by a sigmoid of a gate that q_proj also computes
    values_of_keys: bool = False  # the values are k_proj's output without the keys' norm and rotation
    v_norm: RMS | None = None  # norm of v
    chunk: int | None = None  # tokens of a chunk: a query sees only the keys of its own; None: no chunks
    sharpened: Sharpening | None = None  # scales queries by their positions
    o_norm: RMS | None = None  # norm of the output of all heads, before ``o``
    reads_only: bool = False  # it reads keys and values that another layer has stored, see `LayerSpec`
    picture: Picture | None = (
        None  # what a query sees of a picture that every sequence begins with; None: there is none
    )
    divided: DividedHeads | None = None  # for a device's part of attention with norms over all heads; None: all heads

    name: ClassVar[str] = "self_attn"
    projections: ClassVar[Projections] = (("q_proj", "k_proj", "v_proj"), ("o_proj",))

    @property
    def state(self) -> PagedKV:
        """What a layer keeps."""
        # A text whose tokens see later ones is in one step as a whole, so that no key leaves a window between steps.
        window = self.chunk or self.window  # no token sees more than a chunk
        return PagedKV(kv_heads=self.kv_heads, head_dim=self.head_dim, window=window if self.causal else None)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes to show to users, by their usual names."""
        return {"heads": self.heads, "KV heads": self.kv_heads, "head size": self.head_dim}

    @property
    def divisible(self) -> int:
        """The number of query heads: each device needs at least one."""
        return self.heads

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        shares = self._shares(devices)
        if axis == "heads":
            return of_entries(shares.share_of_queries, size // self.heads)
        if axis == "kv_heads":
            return of_entries(shares.share_of_keys, size // self.kv_heads)
        raise unknown_axis(axis)

    def local(self, devices: int) -> Attention:
        """The part of the mixer that each device has if ``devices`` of them divide it."""
        shares, slopes = self._shares(devices), self.slopes
        if slopes is not None:  # of all devices, one device after another
            heads = shares.share_of_queries.ravel().tolist()
            slopes = tuple(0.0 if head == NOTHING else slopes[head] for head in heads)
        over_all = self.o_norm is not None or (self.qk_norm is not None and self.qk_norm_over == "all heads")
        divided = self._divided_heads(shares) if over_all else None
        return replace(self, heads=shares.heads, kv_heads=shares.pieces, slopes=slopes, divided=divided)

    def _shares(self, devices: int) -> HeadShares:
        return HeadShares(self.kv_heads, self.heads // self.kv_heads, devices)

    def _divided_heads(self, shares: HeadShares) -> DividedHeads:
        keys = shares.share_of_keys.ravel()
        copies = np.bincount(keys[keys != NOTHING], minlength=self.kv_heads)
        counted = np.where(keys == NOTHING, 0.0, 1 / copies[keys])
        return DividedHeads(self.heads, self.kv_heads, tuple(counted.tolist()))

    @property
    def is_fused(self) -> bool:
        """Whether kernels that fuse the whole sublayer support it."""
        normed = self.qk_norm is None or (
            isinstance(self.qk_norm, RMS) and self.qk_norm_over == "head" and self.qk_norm_first
        )
        plain_result = self.o_norm is None and self.picture is None
        own_values = not self.values_of_keys and self.v_norm is None and not self.reads_only
        plain_queries = not self.gated and self.sharpened is None and self.chunk is None
        plain = own_values and plain_queries and not self.sinks and self.clip is None and self.slopes is None
        return normed and plain and plain_result
