"""Divides a model over N devices: the model of one device, and its part of each parameter.

Each device runs a model with fewer heads, inner columns and rows of the vocabulary. Shapes are the same on all devices,
padded with zeros where one has less. Norms, routers and projections to latent vectors are copied to all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from llmjax.errors import ConfigError
from llmjax.models import MLP, RMS, Attention, Experts, GatedMLP, LayerSpec, ModelConfig
from llmjax.models.layers.layer import FeedForward
from llmjax.models.layers.mixer import Mixer
from llmjax.models.layers.shares import Share, even_share, inner_share, spread_share

LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class Cut:
    """The entries of an axis of an array that each device has."""

    axis: int
    entries: Share  # [devices, entries of a device]


@dataclass(frozen=True)
class Division:
    """The division of a model's parameters.

    Attributes:
        config: config of the whole model.
        devices: number of devices that divide it.
        whole_experts: whether each device has some experts of a mixture; else it has a part of each expert.

    Raises:
        ConfigError: the model cannot be divided over this number of devices.
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
        """The division of a parameter; None: every device has all of it.

        Args:
            name: name of the parameter in the model.
            axes: logical names of its axes.
            shape: shape of the whole parameter.
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
                case "heads" | "kv_heads" | "channels" | "parts":
                    assert mixer is not None
                    return Cut(axis, mixer.share(part, shape[axis], self.devices))
        return None

    @cached_property
    def _vocab(self) -> Share:
        return even_share(self.config.vocab_size, self.devices)

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(
            layer,
            mixer=layer.mixer.local(self.devices),
            beside=None if layer.beside is None else layer.beside.local(self.devices),
            feed_forward=self._feed_forward(layer.feed_forward),
        )

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
    """The usual names of parts of a model that cannot be divided over devices yet."""
    return [part for part, is_in in UNDIVIDED.items() if any(is_in(layer) for layer in config.layers)]


def most_devices(config: ModelConfig) -> int:
    """The most devices that can divide a model without `undivided_parts`."""
    return max(mixer.divisible for layer in config.layers for mixer in _mixers(layer))


def _mixers(layer: LayerSpec) -> list[Mixer]:
    return [layer.mixer] if layer.beside is None else [layer.mixer, layer.beside]


def _mixer_of(layer: LayerSpec, name: str) -> Mixer:
    """The mixer of a layer that a parameter belongs to; the first mixer if it belongs to neither."""
    beside = layer.beside
    return beside if beside is not None and f".{beside.name}." in name else layer.mixer


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
