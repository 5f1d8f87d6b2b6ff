"""Weights as kernels take them that compute more than one product: sublayers of a decoder layer, and experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from llmjax.kernels.norm import Norm
from llmjax.kernels.qtensor import QTensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projection:
    """A weight matrix and its bias."""

    weight: jax.Array | QTensor  # [out, in]
    bias: jax.Array | None = field(default=None)  # [out]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionWeights:
    """``x + after(o(attention(q_norm(q(n)), k_norm(k(n)), v(n))))`` with ``n = before(x)``; None: no norm."""

    before: Norm | None
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm | None  # over the head size
    k_norm: Norm | None
    o: Projection
    after: Norm | None


@dataclass(frozen=True)
class AttentionRules:
    """What is static about a layer's attention; see ``kernels.rope.rotate`` and ``kernels.attention.attend``."""

    scale: float
    interleaved: bool = False
    window: int | None = None
    causal: bool = True
    softcap: float | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLPWeights:
    """``x + after(down(activation(gate(n)) * up(n)))`` with ``n = before(x)``; None: no norm. Without ``gate``:
    ``activation(up(n))``."""

    before: Norm | None
    gate: Projection | None
    up: Projection
    down: Projection
    after: Norm | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """``down(activation(gate(x)) * up(x))`` of each of E experts, stacked.

    A weight is an array [E, out, in], or a QTensor whose words are [E, tiles, words of a record, tile] and whose
    columns, where it has any, are [E, in]. A bias is [E, out] or None.
    """

    gate: Projection  # [E, F, D]
    up: Projection  # [E, F, D]
    down: Projection  # [E, D, F]

    @property
    def count(self) -> int:
        """Experts."""
        return int(self.gate.weight.shape[0])
