"""A model divided over N devices: what the model of one device is, and which part of each parameter it has.

Each device runs a model of its own with fewer heads, inner columns and rows of the vocabulary, of one shape for all;
what one has less than others is zeros. Norms, routers and what makes latent vectors are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from llmjax.errors import ConfigError
from llmjax.models import (
    MLP,
    Attention,
    Experts,
    GatedDelta,
    GatedMLP,
    LatentAttention,
    LayerSpec,
    LightningAttention,
    Mamba2,
    ModelConfig,
    ShortConvolution,
)
from llmjax.models.layers.layer import FeedForward, Mixer
from llmjax.parallel.shares import NOTHING, HeadShares, Share, even_share, inner_share, of_entries, spread_share

LAYER = re.compile(r"\.layers\.(\d+)\.")
UNDIVIDED = Mamba2 | ShortConvolution | LightningAttention


@dataclass(frozen=True, eq=False)
class Cut:
    """Which entries of an axis of an array each device has."""

    axis: int
    entries: Share  # [devices, entries of each]


@dataclass(frozen=True)
class Division:
    """How the parameters of a model are divided.

    Attributes:
        config: of the whole model.
        devices: that divide it.
        whole_experts: each device has some experts of a mixture, else a part of each one.

    Raises:
        ConfigError: the model cannot be divided, or not among so many.
    """

    config: ModelConfig
    devices: int
    whole_experts: bool = False

    def __post_init__(self) -> None:
        if self.whole_experts and not any(isinstance(layer.feed_forward, Experts) for layer in self.config.layers):
            raise ConfigError("enable_expert_parallel: the model has no experts")
        if self.devices == 1:
            return
        mixers = [mixer for layer in self.config.layers for mixer in (layer.mixer, layer.beside) if mixer is not None]
        said = f"tensor_parallel_size {self.devices}"
        if any(isinstance(mixer, Attention) and mixer.qk_norm_over == "all heads" for mixer in mixers):
            raise ConfigError(f"{said}: attention with norms over all heads cannot be divided yet")
        if any(isinstance(mixer, UNDIVIDED) for mixer in mixers):
            raise ConfigError(f"{said}: state spaces, short convolutions and lightning attention cannot be divided yet")
        halves = [layer.feed_forward for layer in self.config.layers]
        if any(isinstance(half, Experts) and half.own_norms is not None for half in halves):
            raise ConfigError(f"{said}: experts with norms behind them cannot be divided yet")
        if any(layer.per_layer is not None or layer.state_of is not None for layer in self.config.layers):
            raise ConfigError(f"{said}: embeddings of layers, and keys that layers share, cannot be divided yet")
        most = max(_count(mixer) for mixer in mixers)
        if self.devices > most:
            raise ConfigError(f"{said}: the model has {most} heads in a layer, and each device needs one")

    @cached_property
    def local(self) -> ModelConfig:
        """The model of each device."""
        if self.devices == 1:
            return self.config
        return replace(
            self.config,
            vocab_size=self._vocab.shape[1],
            layers=tuple(self._layer(layer) for layer in self.config.layers),
        )

    def cut(self, name: str, axes: Sequence[str | None], shape: Sequence[int]) -> Cut | None:
        """How a parameter is divided; None: every device has all of it.

        Args:
            name: in the model.
            axes: logical names of its axes.
            shape: of the whole.
        """
        if self.devices == 1:
            return None
        found = LAYER.search(name)
        layer = self.config.layers[int(found[1])] if found else None
        for axis, part in enumerate(axes):
            match part:
                case "vocab":
                    return Cut(axis, self._vocab)
                case "experts" if self.whole_experts:
                    return Cut(axis, spread_share(shape[axis], self.devices))
                case "inner":
                    return Cut(axis, inner_share(shape[axis], self.devices))
                case "heads" | "kv_heads":
                    assert layer is not None
                    share, count = self._heads(layer.mixer, keys=part == "kv_heads")
                    return Cut(axis, of_entries(share, shape[axis] // count))
                case "channels":
                    assert layer is not None and isinstance(layer.mixer, GatedDelta)
                    return Cut(axis, self._channels(layer.mixer))
        return None

    @cached_property
    def _vocab(self) -> Share:
        return even_share(self.config.vocab_size, self.devices)

    def _heads(self, mixer: Mixer, *, keys: bool) -> tuple[Share, int]:
        """The heads of each device, and how many there are."""
        if isinstance(mixer, Attention):
            shares = self._attention(mixer)
            return (shares.share_of_keys, mixer.kv_heads) if keys else (shares.share_of_queries, mixer.heads)
        assert not keys
        count = _count(mixer)
        return even_share(count, self.devices), count

    def _channels(self, mixer: GatedDelta) -> Share:
        """Of the convolution: queries, keys and values of a device's heads, which the whole has one after another."""
        share, count = self._heads(mixer, keys=False)
        found, before = [], 0
        for size in (mixer.key_dim, mixer.key_dim, mixer.value_heads // count * mixer.value_dim):
            entries = of_entries(share, size)
            found.append(np.where(entries == NOTHING, NOTHING, entries + before))
            before += count * size
        return np.concatenate(found, axis=1)

    def _attention(self, mixer: Attention) -> HeadShares:
        return HeadShares(mixer.kv_heads, mixer.heads // mixer.kv_heads, self.devices)

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mixer=self._mixer(layer.mixer), feed_forward=self._feed_forward(layer.feed_forward))

    def _mixer(self, mixer: Mixer) -> Mixer:
        share, _ = self._heads(mixer, keys=False)
        if isinstance(mixer, LatentAttention):
            return replace(mixer, heads=share.shape[1])
        if isinstance(mixer, GatedDelta):
            shared = mixer.value_heads // mixer.key_heads
            return replace(mixer, key_heads=share.shape[1], value_heads=shared * share.shape[1])
        assert isinstance(mixer, Attention)
        slopes = mixer.slopes
        if slopes is not None:  # of all devices, one after another
            slopes = tuple(0.0 if head == NOTHING else slopes[head] for head in share.ravel().tolist())
        return replace(mixer, heads=share.shape[1], kv_heads=self._attention(mixer).pieces, slopes=slopes)

    def _feed_forward(self, half: FeedForward | None) -> FeedForward | None:
        if half is None:
            return None
        inner = inner_share(half.inner, self.devices).shape[1]
        match half:
            case GatedMLP() | MLP():
                return replace(half, inner=inner)
            case Experts(shared=shared):
                if shared is not None:
                    shared = replace(shared, inner=inner_share(shared.inner, self.devices).shape[1])
                if self.whole_experts:
                    return replace(half, held=spread_share(half.count, self.devices).shape[1], shared=shared)
                return replace(half, inner=inner, shared=shared)


def _count(mixer: Mixer) -> int:
    """Heads that can be divided."""
    assert not isinstance(mixer, UNDIVIDED)
    return mixer.key_heads if isinstance(mixer, GatedDelta) else mixer.heads
