"""The base class of recurrent mixers that end in ``out_proj``."""

from __future__ import annotations

from abc import abstractmethod

import jax
from flax import nnx

from llmjax.models.layers.context import Context
from llmjax.models.layers.state import RecurrentState
from llmjax.models.modules.linear import Linear


class ReadOut(nnx.Module):
    """Applies ``out_proj`` to what a mixer reads from its state."""

    out_proj: Linear

    @abstractmethod
    def _read(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """The input of ``out_proj``, and the state after the tokens."""

    def __call__(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """[T, D] to [T, D], and the state after the tokens."""
        read, state = self._read(n, context)
        return self.out_proj(read, context.batch.used), state

    def partial(self, n: jax.Array, context: Context) -> tuple[jax.Array, RecurrentState]:
        """`__call__` without the bias of ``out_proj``."""
        read, state = self._read(n, context)
        return self.out_proj.product(read, context.batch.used), state

    @property
    def last_bias(self) -> jax.Array | None:
        """The bias that `partial` leaves out, [D]."""
        return self.out_proj.projection.bias
