"""The modules of a `Pooler`'s matrices."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models.layers.pooling import Dense, Pooler
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.residual import normed


class DenseModule(nnx.Module):
    """``norm(activation(x @ weight.T + bias))``."""

    def __init__(self, spec: Dense, size: int) -> None:
        self.spec = spec
        # It is small, and its precision matters most for scores and vectors.
        self.dense = Linear(size, spec.size, bias=spec.bias, dtype=jnp.dtype(jnp.float32), plain=True)
        self.norm = None if spec.norm is None else build_norm(spec.norm, spec.size)

    def __call__(self, x: jax.Array, places: jax.Array | None = None) -> jax.Array:
        """f32 [N, in] to [N, size]; for ``places`` see `Linear.of_rows`."""
        x = self.dense.of_rows(x, places)
        x = x if self.spec.activation is None else ACTIVATIONS[self.spec.activation](x)
        return normed(x, self.norm)


def pooler_head(spec: Pooler, hidden_size: int) -> nnx.List[DenseModule]:
    """The modules of a pooler's matrices."""
    sizes: Sequence[int] = [hidden_size, *(dense.size for dense in spec.dense)]
    return nnx.List([DenseModule(dense, size) for dense, size in zip(spec.dense, sizes, strict=False)])
