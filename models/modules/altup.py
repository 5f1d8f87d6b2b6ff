"""The modules of `AltUp` and `LowRank`. Formulas: Hugging Face's ``Gemma3nTextAltUp``, ``Gemma3nTextLaurelBlock`` and
``Gemma3nTextModel``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.models.layers.altup import AltUp, LowRank
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter

LEAST = 1e-5  # lower limit of the mean square of a projected stream


class Streams(nnx.Module):
    """Expands one residual stream to several before the first layer, and merges them after the last one."""

    def __init__(self, spec: AltUp, size: int, *, dtype: jnp.dtype) -> None:
        others = range(spec.streams - 1)
        self.projections = nnx.List([Linear(size, size, bias=False, dtype=dtype) for _ in others])
        self.unembed_projections = nnx.List([Linear(size, size, bias=False, dtype=dtype) for _ in others])

    def widened(self, x: jax.Array) -> jax.Array:
        """[T, D] to [T, streams, D]: x, and projections scaled to its length."""
        return jnp.stack([x, *(_as_long(project(x), x) for project in self.projections)], axis=1)

    def narrowed(self, x: jax.Array) -> jax.Array:
        """[T, streams, D] to [T, D]: the mean of the first stream and the others' projections, scaled to its length."""
        first = x[:, 0]
        others = [_as_long(project(x[:, i]), first) for i, project in enumerate(self.unembed_projections, start=1)]
        return jnp.stack([first, *others]).mean(axis=0)


class AltUpModule(nnx.Module):
    """Predicts the streams of a layer from each other, and corrects them. All coefficients are in f32."""

    def __init__(self, spec: AltUp, size: int) -> None:
        self.spec, count, f32 = spec, spec.streams, jnp.dtype(jnp.float32)
        self.prediction_coefs = Linear(count, count * count, bias=False, dtype=f32, plain=True)
        self.correction_coefs = Linear(count, count, bias=False, dtype=f32, plain=True)
        self.modality_router = Linear(size, count, bias=False, dtype=f32, plain=True)
        self.router_norm = build_norm(spec.norm, size)
        self.correct_output_scale = parameter((size,), jnp.float32, axes=(None,))

    def predicted(self, x: jax.Array) -> jax.Array:
        """Predictions [T, streams, D]: each stream plus a mixture of all."""
        coefficients = self.prediction_coefs(self._routed(x[:, self.spec.active]))
        coefficients = coefficients.reshape(len(x), self.spec.streams, self.spec.streams)
        mixtures = jnp.einsum("tba,tad->tbd", coefficients, x.astype(jnp.float32), precision="highest")
        return x + mixtures.astype(x.dtype)

    def corrected(self, predicted: jax.Array, computed: jax.Array) -> jax.Array:
        """Predictions [T, streams, D], each plus a part of the active stream's error.

        Args:
            computed: the active stream after the layer, [T, D].
        """
        parts = 1 + self.correction_coefs(self._routed(computed))
        error = computed - predicted[:, self.spec.active]
        return predicted + parts[..., None].astype(error.dtype) * error[:, None]

    def scaled(self, x: jax.Array) -> jax.Array:
        """[T, D] to the input of the per-layer gates."""
        return x * self.correct_output_scale.get_value().astype(x.dtype) if self.spec.scaled else x

    def _routed(self, x: jax.Array) -> jax.Array:
        """Applies the router, [T, D] to f32 [T, streams]."""
        normed = self.router_norm(x.astype(jnp.float32)) / x.shape[1]
        return jnp.tanh(self.modality_router(normed))


class LowRankModule(nnx.Module):
    """``n + norm(right(left(n)))``."""

    def __init__(self, spec: LowRank, size: int, *, dtype: jnp.dtype) -> None:
        self.linear_left = Linear(size, spec.rank, bias=False, dtype=dtype)
        self.linear_right = Linear(spec.rank, size, bias=False, dtype=dtype)
        self.post_laurel_norm = build_norm(spec.norm, size)

    def __call__(self, n: jax.Array) -> jax.Array:
        """[T, D] to [T, D]."""
        return n + self.post_laurel_norm(self.linear_right(self.linear_left(n)))


def _as_long(x: jax.Array, other: jax.Array) -> jax.Array:
    """Scales each row of x [T, D] to the length of that of ``other``."""
    wanted, own = (jnp.mean(jnp.square(each.astype(jnp.float32)), -1, keepdims=True) for each in (other, x))
    return x * (jnp.sqrt(wanted) * jax.lax.rsqrt(jnp.maximum(own, LEAST))).astype(x.dtype)
