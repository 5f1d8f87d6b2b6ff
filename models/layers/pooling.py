"""The spec of pooling: turning hidden states into a vector for a text, or for each of its tokens."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from llmjax.models.layers.norm import NormSpec

PoolingKind = Literal["last", "cls", "mean", "each"]


Task = Literal["embed", "classify"]


LabelActivation = Literal["identity", "sigmoid", "softmax"]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """One of the matrices after pooling: ``norm(activation(dense(x)))``, in f32."""

    size: int  # output size
    bias: bool = True
    activation: str | None = None  # a key of ACTIVATIONS
    norm: NormSpec | None = None


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """What a model has learned to read around a text.

    Attributes:
        before, after: texts in front of it and after it.
        second: a token that stands after the first one, which the tokenizer puts there (ColBERT); empty: none does.
        complete: whether the tokenizer puts nothing around it, because it is in ``before`` (ColPali).
        skipped: tokens whose vectors do not count where every token has one, such as punctuation in documents; a text
            is known by ``second``.
    """

    before: str = ""
    after: str = ""
    second: str = ""
    complete: bool = False
    skipped: tuple[str, ...] = ()


QUERY, DOCUMENT = "query", "document"
"""Names of prompts for what is looked for, and for what it is looked for in."""
PUNCTUATION = tuple(string.punctuation)
"""Tokens of documents that ColBERT and PyLate skip where their files do not say."""


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """How a model that does not generate turns a text into vectors.

    Attributes:
        kind: the hidden state that represents the text: the last token's, the first token's, or the mean of all; or
            "each": every token has a vector of its own, and texts are compared by all of them (late interaction).
        task: whether the vector is the text's embedding or the logits of labels.
        dense: matrices after pooling, in order; those of tokens, if each has a vector.
        normalize: whether embeddings are scaled to length one.
        activation: activation of the labels' logits.
        labels: names of the labels, in order.
        filled_to: tokens of every text, shorter ones being filled up with padding that is read as they are (SigLIP);
            None: texts keep their lengths.
        lowercase: whether texts are made lower case.
        of_pictures: whether a picture's row is its vector, which no layer of the text model makes (CLIP, SigLIP).
    """

    kind: PoolingKind
    task: Task = "embed"
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    activation: LabelActivation = "identity"
    labels: tuple[str, ...] = ()
    filled_to: int | None = None
    lowercase: bool = False
    of_pictures: bool = False

    def size(self, hidden_size: int) -> int:
        """The size of a vector."""
        return self.dense[-1].size if self.dense else hidden_size
