"""A weight matrix with an optional bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.adapted import Adapted
from llmjax.kernels.blocks import Projection
from llmjax.kernels.linear import linear
from llmjax.models.modules.parameter import parameter


class Linear(nnx.Module):
    """``x @ weight.T + bias``; the weight is [out, in] as in Hugging Face checkpoints.

    Args:
        axes: logical names of the weight's axes, see ``llmjax.kernels.sharding.ShardingRules``.
        dtype: dtype of the weight; the bias is f32.
        plain: see ``parameter``.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        bias: bool,
        dtype: jnp.dtype,
        axes: tuple[str | None, str | None] = (None, None),
        plain: bool = False,
    ) -> None:
        self.weight = parameter((size_out, size_in), dtype, axes=axes, plain=plain)
        self.bias = parameter((size_out,), jnp.float32, axes=axes[:1]) if bias else None

    def __call__(self, x: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """[T, in] to [T, out]; for ``used`` see ``llmjax.kernels.linear.linear``."""
        return linear(x, self.weight.get_value(), None if self.bias is None else self.bias.get_value(), used)

    def of_rows(self, x: jax.Array, places: jax.Array | None, used: jax.Array | None = None) -> jax.Array:
        """`__call__` of rows that are not the step's tokens.

        Args:
            places: i32 [T], whose adapters the rows have; None: there are no adapters.
        """
        weight = self.weight.get_value()
        if places is not None and isinstance(weight, Adapted):
            weight = weight.at(places)
        return linear(x, weight, None if self.bias is None else self.bias.get_value(), used)

    def product(self, x: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """`__call__` without the bias."""
        return linear(x, self.weight.get_value(), None, used)

    @property
    def projection(self) -> Projection:
        """The weight and bias in the form that kernels take."""
        return Projection(self.weight.get_value(), None if self.bias is None else self.bias.get_value())
