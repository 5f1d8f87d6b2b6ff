"""Sequence classifiers: the keys of config.json that all of them read in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmjax.models.fields import Fields
from llmjax.models.layers.pooling import Dense, LabelActivation, Pooler, PoolingKind

# What sentence-transformers writes for the activation of a cross-encoder's scores.
_ACTIVATIONS: dict[str, LabelActivation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": "identity",
}
MAX_LABELS = 2**16
TOKENS = "classifier_from_token"
DIFFERENCE = "from_2_way_softmax"
ORIGINAL_QWEN3 = "is_original_qwen3_reranker"
_METHODS = (DIFFERENCE, "no_post_processing")


@dataclass(frozen=True)
class TokenLabels:
    """Labels whose logits are those of tokens: the labels' matrix is made of rows of the language model's head.

    The keys are vLLM's, as is what they mean (`vllm.model_executor.models.adapters`).

    Attributes:
        tokens: texts or ids of the tokens.
        difference: there is one label, whose logit is the second token's minus the first token's, so that its sigmoid
            is the second token's probability in a softmax over both.
    """

    tokens: tuple[str | int, ...]
    difference: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TokenLabels | None:
        """Reads the labels from a config.json; None: labels have a matrix of their own.

        Raises:
            UnsupportedModel: a key is wrong.
        """
        fields = Fields(config)
        tokens = fields.get(TOKENS)
        if tokens is None:
            fields.require(ORIGINAL_QWEN3, False)
            return None
        known = isinstance(tokens, list | tuple) and all(
            isinstance(token, str) or (type(token) is int and token >= 0) for token in tokens
        )
        if not known or not 1 <= len(tokens) <= MAX_LABELS:
            raise fields.error(TOKENS, "must be a list of tokens, by their texts or their ids")
        original = fields.get(ORIGINAL_QWEN3) is True
        method = DIFFERENCE if original and fields.get("method") is None else fields.choice("method", _METHODS)
        if method == DIFFERENCE and len(tokens) != 2:
            raise fields.error(TOKENS, f"must be two tokens, no and yes, where method is {DIFFERENCE}")
        return cls(tuple(tokens), method == DIFFERENCE)

    @property
    def count(self) -> int:
        """The number of labels."""
        return 1 if self.difference else len(self.tokens)


def classifier_pooler(fields: Fields, *, kind: PoolingKind, before: Sequence[Dense] = (), bias: bool = True) -> Pooler:
    """The head of a sequence classifier.

    Args:
        kind: which hidden state the head is given.
        before: matrices before the one of the labels.
        bias: whether the matrix of the labels has a bias.
    """
    labels = _labels(fields)
    last = Dense(size=len(labels), bias=bias)
    activation = _activation(fields, len(labels))
    return Pooler(
        kind=kind, task="classify", dense=(*before, last), normalize=False, activation=activation, labels=labels
    )


def reward_pooler(fields: Fields, *, size: int, one_matrix: bool) -> Pooler:
    """The head of a reward model; its outputs are returned without an activation.

    Args:
        size: size of the model's hidden states.
        one_matrix: whether the head is one matrix without a bias (InternLM2), not two matrices (Qwen).
    """
    labels = _labels(Fields({"num_labels": 1, **fields.values}))
    before = () if one_matrix else (Dense(size=size, activation="relu"),)
    dense = (*before, Dense(size=len(labels), bias=not one_matrix))
    return Pooler(kind="last", task="classify", dense=dense, normalize=False, labels=labels)


def _labels(fields: Fields) -> tuple[str, ...]:
    """Names of the labels: from tokens, else ``id2label``, else ``num_labels``, else transformers' default of two."""
    if (made := TokenLabels.of(fields.values)) is not None:
        return tuple(f"LABEL_{number}" for number in range(made.count))
    names = fields.mapping("id2label")
    if names:
        if len(names) > MAX_LABELS or {str(number) for number in range(len(names))} != {str(key) for key in names}:
            raise fields.error("id2label", "must name the labels 0, 1, …")
        return tuple(str({str(key): name for key, name in names.items()}[str(i)]) for i in range(len(names)))
    count = 2 if fields.get("num_labels") is None else fields.integer("num_labels", maximum=MAX_LABELS)
    return tuple(f"LABEL_{number}" for number in range(count))


def _activation(fields: Fields, labels: int) -> LabelActivation:
    """The activation that sentence-transformers' key or ``problem_type`` names; else sigmoid for one label, softmax for
    several."""
    named: Any = fields.mapping("sentence_transformers").get("activation_fn") or fields.get(
        "sbert_ce_default_activation_function"
    )
    if named is not None:
        key = str(named).removesuffix("()")
        if key not in _ACTIVATIONS:
            raise fields.error("sentence_transformers", f"names an activation that is not supported: {key[:80]!r}")
        return _ACTIVATIONS[key]
    by_problem: dict[Any, LabelActivation] = {
        "regression": "identity",
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
    }
    problem = fields.get("problem_type")
    if problem is not None:
        return by_problem[fields.choice("problem_type", by_problem)]
    return "sigmoid" if labels == 1 else "softmax"
