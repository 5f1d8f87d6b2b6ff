"""The layer of an encoder as kernels take it that compute all of it: every token sees those of its segment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp

from llmjax.kernels.blocks import Projection
from llmjax.kernels.norm import Norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncoderLayerWeights:
    """``y = x + o(attention(q_norm(q(n)), k_norm(k(n)), v(n)))`` with ``n = before(x)``, then
    ``y + down(activation(gate(m)) * up(m))`` with ``m = second(y)``; without ``gate`` ``activation(up(m))``.

    Queries and keys are rotated after their norms, which are over each head or over all of them. Matrices may be a
    `PanelTensor`, too.
    """

    before: Norm
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    second: Norm
    gate: Projection | None
    up: Projection
    down: Projection
    q_norm: Norm | None = field(default=None)
    k_norm: Norm | None = field(default=None)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The matrices in the order in which they are used."""
        gate = () if self.gate is None else (self.gate,)
        return (self.q, self.k, self.v, self.o, *gate, self.up, self.down)


@dataclass(frozen=True)
class EncoderLayerRules:
    """What is static about a layer.

    Attributes:
        heads: how many heads queries, keys and values have each.
        scale: factor of scores.
        activation: a key of ACTIVATIONS.
        whole: whether the norms of queries and keys are over all heads as one vector.
        pairs: which entries of a head are rotated together, see ``Rope2D``.
        dtype: what queries, keys and values are rounded to before they meet.
    """

    heads: int
    scale: float
    activation: str
    whole: bool
    pairs: Literal["half", "quarter", "adjacent"]
    dtype: jnp.dtype
