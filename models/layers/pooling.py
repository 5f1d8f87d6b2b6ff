"""What is made of hidden states instead of tokens: a vector of a text, or of each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models.layers.linear import Linear
from llmjax.models.layers.norm import NormSpec
from llmjax.models.layers.residual import normed

PoolingKind = Literal["last", "cls", "mean"]
Task = Literal["embed", "classify"]
LabelActivation = Literal["identity", "sigmoid", "softmax"]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """``norm(activation(dense(x)))``: one of the matrices behind pooling, in f32."""

    size: int  # entries that leave it
    bias: bool = True
    activation: str | None = None  # a key of ACTIVATIONS
    norm: NormSpec | None = None

    def build(self, size: int) -> DenseModule:
        """The module for vectors of ``size`` entries."""
        return DenseModule(self, size)


class DenseModule(nnx.Module):
    """``norm(activation(x @ weight.T + bias))``."""

    def __init__(self, spec: Dense, size: int) -> None:
        self.spec = spec
        # Small, and what a score or a vector's direction stands and falls with.
        self.dense = Linear(size, spec.size, bias=spec.bias, dtype=jnp.dtype(jnp.float32), plain=True)
        self.norm = None if spec.norm is None else spec.norm.build(spec.size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """f32 [N, in] to [N, size]."""
        x = self.dense(x)
        x = x if self.spec.activation is None else ACTIVATIONS[self.spec.activation](x)
        return normed(x, self.norm)


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """What a model that does not generate makes of a text.

    Attributes:
        kind: which hidden states a text's vector is made of: the last token's, the first one's, or the mean of all.
        task: what the vector is: the text's embedding, or logits of labels.
        dense: matrices behind pooling, in order.
        normalize: embeddings are divided by their lengths.
        activation: of the labels' logits.
        labels: names of the labels, in order.
    """

    kind: PoolingKind
    task: Task = "embed"
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    activation: LabelActivation = "identity"
    labels: tuple[str, ...] = ()

    def size(self, hidden_size: int) -> int:
        """Entries of a vector."""
        return self.dense[-1].size if self.dense else hidden_size

    def build(self, hidden_size: int) -> nnx.List[DenseModule]:
        """The modules of ``dense``."""
        sizes: Sequence[int] = [hidden_size, *(dense.size for dense in self.dense)]
        return nnx.List([dense.build(size) for dense, size in zip(self.dense, sizes, strict=False)])
