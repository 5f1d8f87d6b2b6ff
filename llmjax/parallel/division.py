"""A model divided over N devices: what the model of one device is, and which part of each parameter it has.

Each device runs a model of its own with fewer heads, inner columns and rows of the vocabulary, of one shape for all;
what one has less than others is zeros. Norms, routers and what makes latent vectors are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from llmjax.errors import ConfigError
from llmjax.models import (
    MLP,
    RMS,
    Attention,
    ChannelDelta,
    Experts,
    GatedDelta,
    GatedMLP,
    LatentAttention,
    LayerSpec,
    LightningAttention,
    Mamba,
    Mamba2,
    ModelConfig,
    ShortConvolution,
)
from llmjax.models.layers.attention import DividedHeads
from llmjax.models.layers.layer import FeedForward, Mixer
from llmjax.models.layers.mamba2 import DividedGroups
from llmjax.parallel.shares import NOTHING, UNITS, HeadShares, Share, even_share, inner_share, of_entries, spread_share

LAYER = re.compile(r"\.layers\.(\d+)\.")
ByChannel = Mamba | ShortConvolution  # mixers whose channels are divided; those of others go with their heads


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
        said = f"tensor_parallel_size {self.devices}"
        for undivided in undivided_parts(self.config):
            raise ConfigError(f"{said}: {undivided} cannot be divided yet")
        most = most_devices(self.config)
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
        mixer = _mixer_of(self.config.layers[int(found[1])], name) if found else None
        for axis, part in enumerate(axes):
            match part:
                case "vocab":
                    return Cut(axis, self._vocab)
                case "experts" if self.whole_experts:
                    return Cut(axis, spread_share(shape[axis], self.devices))
                case "inner":
                    return Cut(axis, inner_share(shape[axis], self.devices))
                case "heads" | "kv_heads":
                    assert mixer is not None
                    share, count = self._heads(mixer, keys=part == "kv_heads")
                    return Cut(axis, of_entries(share, shape[axis] // count))
                case "channels":
                    assert isinstance(mixer, ByChannel | ChannelDelta | GatedDelta | Mamba2)
                    return Cut(axis, self._channels(mixer))
                case "parts" if isinstance(mixer, Mamba2):
                    return Cut(axis, _joined(self._state_space_parts(mixer), mixer.parts))
                case "parts":  # of one size
                    assert isinstance(mixer, ByChannel)
                    size = _channels_of(mixer)
                    count = shape[axis] // size
                    return Cut(axis, _joined([self._channels(mixer)] * count, [size] * count))
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
        if isinstance(mixer, Mamba2):
            return self._state_space(mixer).share_of_queries, mixer.heads
        count = _count(mixer)
        return even_share(count, self.devices), count

    def _channels(self, mixer: ByChannel | ChannelDelta | GatedDelta | Mamba2) -> Share:
        """Of a convolution: where queries, keys and values of a device's heads go through the same one, the whole has
        them one after another."""
        if isinstance(mixer, ByChannel):
            return inner_share(_channels_of(mixer), self.devices)
        if isinstance(mixer, Mamba2):
            return _joined(self._state_space_parts(mixer)[1:4], mixer.parts[1:4])
        share, count = self._heads(mixer, keys=False)
        if isinstance(mixer, ChannelDelta):
            return of_entries(share, mixer.head_dim)
        sizes = (mixer.key_dim, mixer.key_dim, mixer.value_heads // count * mixer.value_dim)
        return _joined([of_entries(share, size) for size in sizes], [count * size for size in sizes])

    def _state_space(self, mixer: Mamba2) -> HeadShares:
        """Heads of a group share what is written and read with, as queries share keys."""
        return HeadShares(mixer.groups, mixer.heads // mixer.groups, self.devices)

    def _state_space_parts(self, mixer: Mamba2) -> tuple[Share, ...]:
        """Gate, x, B, C and steps, each by itself."""
        shares = self._state_space(mixer)
        inner = of_entries(shares.share_of_queries, mixer.head_dim)
        shared = of_entries(shares.share_of_keys, mixer.state_dim)
        return inner, inner, shared, shared, shares.share_of_queries

    def _divided_groups(self, mixer: Mamba2) -> DividedGroups | None:
        shares, size = self._state_space(mixer), mixer.heads // mixer.groups
        if mixer.norm is None or shares.queries == size:  # groups are whole
            return None
        numbers = np.maximum(shares.share_of_keys, 0).ravel().tolist()
        return DividedGroups(mixer.groups, size * mixer.head_dim, tuple(numbers))

    def _attention(self, mixer: Attention) -> HeadShares:
        return HeadShares(mixer.kv_heads, mixer.heads // mixer.kv_heads, self.devices)

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(
            layer,
            mixer=self._mixer(layer.mixer),
            beside=None if layer.beside is None else self._mixer(layer.beside),
            feed_forward=self._feed_forward(layer.feed_forward),
        )

    def _mixer(self, mixer: Mixer) -> Mixer:
        if isinstance(mixer, Mamba):
            return replace(mixer, inner=self._channels(mixer).shape[1])
        if isinstance(mixer, ShortConvolution):
            return replace(mixer, size=self._channels(mixer).shape[1])
        share, _ = self._heads(mixer, keys=False)
        if isinstance(mixer, LatentAttention | ChannelDelta):
            return replace(mixer, heads=share.shape[1])
        if isinstance(mixer, LightningAttention):
            return replace(mixer, heads=share.shape[1], whole=mixer.heads)
        if isinstance(mixer, GatedDelta):
            shared = mixer.value_heads // mixer.key_heads
            return replace(mixer, key_heads=share.shape[1], value_heads=shared * share.shape[1])
        if isinstance(mixer, Mamba2):
            pieces = self._state_space(mixer).pieces
            return replace(mixer, heads=share.shape[1], groups=pieces, divided=self._divided_groups(mixer))
        assert isinstance(mixer, Attention)
        slopes = mixer.slopes
        if slopes is not None:  # of all devices, one after another
            slopes = tuple(0.0 if head == NOTHING else slopes[head] for head in share.ravel().tolist())
        divided = self._divided_heads(mixer) if _goes_over_all_heads(mixer) else None
        pieces = self._attention(mixer).pieces
        return replace(mixer, heads=share.shape[1], kv_heads=pieces, slopes=slopes, divided=divided)

    def _divided_heads(self, mixer: Attention) -> DividedHeads:
        keys = self._attention(mixer).share_of_keys.ravel()
        copies = np.bincount(keys[keys != NOTHING], minlength=mixer.kv_heads)
        counted = np.where(keys == NOTHING, 0.0, 1 / copies[keys])
        return DividedHeads(mixer.heads, mixer.kv_heads, tuple(counted.tolist()))

    def _feed_forward(self, half: FeedForward | None) -> FeedForward | None:
        if half is None:
            return None
        inner = inner_share(half.inner, self.devices).shape[1]
        match half:
            case GatedMLP():
                return replace(half, inner=inner, whole=None if half.down_norm is None else half.inner)
            case MLP():
                return replace(half, inner=inner)
            case Experts(shared=shared):
                if shared is not None:
                    shared = replace(shared, inner=inner_share(shared.inner, self.devices).shape[1])
                if self.whole_experts:
                    return replace(half, held=spread_share(half.count, self.devices).shape[1], shared=shared)
                return replace(half, inner=inner, shared=shared)


def undivided_parts(config: ModelConfig) -> list[str]:
    """What a model has that cannot be divided over devices yet, as people call it."""
    return [part for part, is_in in UNDIVIDED.items() if any(is_in(layer) for layer in config.layers)]


def most_devices(config: ModelConfig) -> int:
    """How many devices may divide a model that has no `undivided_parts`."""
    return max(_count(mixer) for layer in config.layers for mixer in _mixers(layer))


def _mixers(layer: LayerSpec) -> list[Mixer]:
    return [layer.mixer] if layer.beside is None else [layer.mixer, layer.beside]


def _mixer_of(layer: LayerSpec, name: str) -> Mixer:
    """The mixer that a parameter of a layer is of; the first one, where it is of neither."""
    beside = layer.beside
    return beside if beside is not None and f".{beside.name}." in name else layer.mixer


def _goes_over_all_heads(mixer: Attention) -> bool:
    """Whether a norm does."""
    return mixer.o_norm is not None or (mixer.qk_norm is not None and mixer.qk_norm_over == "all heads")


def _has_undivided_norms(layer: LayerSpec) -> bool:
    return any(
        isinstance(mixer, Attention)
        and mixer.qk_norm is not None
        and mixer.qk_norm_over == "all heads"
        and not (isinstance(mixer.qk_norm, RMS) and mixer.qk_norm_first)
        for mixer in _mixers(layer)
    )


def _has_norms_after_experts(layer: LayerSpec) -> bool:
    return isinstance(layer.feed_forward, Experts) and layer.feed_forward.own_norms is not None


UNDIVIDED: Mapping[str, Callable[[LayerSpec], bool]] = {
    "norms over all heads that take a mean away or follow rotation": _has_undivided_norms,
    "experts with norms after them": _has_norms_after_experts,
    "embeddings for each layer": lambda layer: layer.per_layer is not None,
    "keys that layers share": lambda layer: layer.state_of is not None,
}


def _joined(shares: Sequence[Share], sizes: Sequence[int]) -> Share:
    """Shares of parts that the whole has one after another, each of so many entries."""
    starts = np.cumsum([0, *sizes[:-1]])
    found = [np.where(share == NOTHING, NOTHING, share + start) for share, start in zip(shares, starts, strict=True)]
    return np.concatenate(found, axis=1)


def _count(mixer: Mixer) -> int:
    """Heads that can be divided, or what of channels stays together."""
    if isinstance(mixer, ByChannel):
        return -(-_channels_of(mixer) // UNITS[-1])
    return mixer.key_heads if isinstance(mixer, GatedDelta) else mixer.heads


def _channels_of(mixer: ByChannel) -> int:
    return mixer.inner if isinstance(mixer, Mamba) else mixer.size
