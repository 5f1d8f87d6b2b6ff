"""The modules of norms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.norm import Norm, layer_norm, rms_norm
from llmjax.kernels.sharding import all_sum
from llmjax.models.layers.norm import RMS, Layer, NormSpec
from llmjax.models.modules.parameter import parameter


class RMSNorm(nnx.Module):
    """``x / rms(x) * weight``."""

    def __init__(self, spec: RMS, shape: tuple[int, ...], axes: tuple[str | None, ...] = ()) -> None:
        self.spec, self.size = spec, shape[-1]
        self.weight = _vector(shape, axes) if spec.weighted else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.norm)

    @property
    def norm(self) -> Norm:
        """The norm in the form that kernels take."""
        weight = jnp.ones(self.size, jnp.float32) if self.weight is None else self.weight.get_value()
        return Norm(weight, self.spec.eps, self.spec.plus_one)


class LayerNorm(nnx.Module):
    """``(x - mean(x)) / std(x) * weight + bias``."""

    def __init__(self, spec: Layer, shape: tuple[int, ...], axes: tuple[str | None, ...] = ()) -> None:
        self.spec = spec
        self.shape = shape
        self.weight = _vector(shape, axes) if spec.weighted else None
        self.bias = _vector(shape, axes) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias.get_value()
        weight = jnp.ones(self.shape, jnp.float32) if self.weight is None else self.weight.get_value()
        return layer_norm(x, 1 + weight if self.spec.plus_one else weight, bias, eps=self.spec.eps)

    @property
    def norm(self) -> Norm:
        """The norm in the form that kernels take."""
        bias = None if self.bias is None else self.bias.get_value()
        weight = jnp.ones(self.shape, jnp.float32) if self.weight is None else self.weight.get_value()
        return Norm(weight, self.spec.eps, self.spec.plus_one and self.weight is not None, centered=True, bias=bias)


NormModule = RMSNorm | LayerNorm


def build_norm(spec: NormSpec, *shape: int, axes: tuple[str | None, ...] = ()) -> NormModule:
    """The norm over the last axis of ``shape``; each index of the axes before it has weights of its own.

    Args:
        axes: logical names of the weight's axes; empty: not divided.
    """
    return RMSNorm(spec, shape, axes) if isinstance(spec, RMS) else LayerNorm(spec, shape, axes)


def normed_together(x: jax.Array, norm: RMSNorm, size: int, name: str) -> jax.Array:
    """A norm over a vector that is divided over devices.

    Args:
        x: [T, .], this device's entries, padded with zeros if it has fewer than others.
        size: entries of the whole vector.
        name: logical axis along which devices divide the vector.
    """
    squares = all_sum(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True), name)
    return rms_norm(x, norm.norm, mean_square=squares / size)


def is_fused(norm: NormModule | None) -> bool:
    """Whether kernels that fuse several steps support this norm; None: no norm."""
    return norm is None or isinstance(norm, RMSNorm)


def kernel_norm(norm: NormModule | None) -> Norm | None:
    """A norm for which `is_fused` holds, in the form that kernels take."""
    if norm is None:
        return None
    assert isinstance(norm, RMSNorm)
    return norm.norm


def _vector(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    # They are small, so f32 costs nothing and keeps them exact for every dtype of the matrices.
    return parameter(shape, jnp.float32, axes=axes or (None,) * len(shape), plain=len(shape) > 1)
