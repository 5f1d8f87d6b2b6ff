"""What is made of hidden states instead of tokens: a vector of a text, or of each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from llmjax.models.layers.norm import NormSpec

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
