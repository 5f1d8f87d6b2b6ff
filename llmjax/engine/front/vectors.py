"""Pooling requests: the tokens that the engine reads, and its vectors in the form that users ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmjax.engine.core.media import PromptMedia
from llmjax.engine.core.request import PooledRequest, Vectors
from llmjax.engine.info import PoolerInfo
from llmjax.errors import InvalidRequest
from llmjax.pooling_params import NEEDS, PoolingParams, PoolingTask

LEAST_LENGTH = 1e-12  # a vector of zeros stays one


@dataclass(frozen=True)
class PooledTokens:
    """A text, or a pair, that has been tokenized and may be sent to the engine.

    Attributes:
        task: what the model makes of it.
        second_start: where the second text of a pair begins; None: the model does not tell segments apart.
        cache_salt: what the prompt says of it.
        media: its images; None: it has none.
    """

    task: PoolingTask
    token_ids: list[int]
    second_start: int | None = None
    cache_salt: Any = None
    media: PromptMedia | None = None

    @property
    def of_tokens(self) -> bool:
        """Whether a vector of each token is made."""
        return self.task in ("token_embed", "token_classify")


def task_of(params: PoolingParams, pooler: PoolerInfo) -> PoolingTask:
    """The task for a text.

    Raises:
        InvalidRequest: the model is not made for it, or a parameter has no meaning for it.
    """
    each = pooler.kind == "each"
    task = params.task or ("token_embed" if each else pooler.task)
    if each and task == "embed":
        raise InvalidRequest(
            "task 'embed': this model makes a vector of each token of a text, not one of the text (token_embed)",
            field="task",
        )
    if NEEDS[task] != pooler.task:
        raise InvalidRequest(
            f"task {task!r}: this model is made to {'make embeddings' if pooler.task == 'embed' else 'classify texts'}",
            field="task",
        )
    if pooler.task == "classify" and params.dimensions is not None:
        raise InvalidRequest("dimensions are of embeddings; this model classifies texts", field="dimensions")
    if params.dimensions is not None and params.dimensions > pooler.size:
        raise InvalidRequest(
            f"dimensions is {params.dimensions}; the model's vectors have {pooler.size}", field="dimensions"
        )
    allowed = pooler.matryoshka_dimensions
    if params.dimensions is not None and allowed and params.dimensions not in allowed:
        raise InvalidRequest(
            f"dimensions is {params.dimensions}; this model was trained for {', '.join(map(str, allowed))}",
            field="dimensions",
        )
    return task


def pooled_request(tokens: PooledTokens, pooler: PoolerInfo) -> PooledRequest:
    """The request to the engine."""
    every_position = tokens.of_tokens or pooler.kind != "last"
    second = {} if tokens.second_start is None else {"second_start": tokens.second_start}
    return PooledRequest(of_tokens=tokens.of_tokens, every_position=every_position, **second)


def finished(vectors: Vectors, params: PoolingParams, pooler: PoolerInfo) -> Vectors:
    """What the model has made, f32 [..., size], as a request wants it."""
    if pooler.task == "embed":
        vectors = vectors[..., : params.dimensions]
        if pooler.normalize if params.normalize is None else params.normalize:
            lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / np.maximum(lengths, LEAST_LENGTH)
        return vectors
    if params.use_activation is False:
        return vectors
    match pooler.activation:
        case "sigmoid":
            return _sigmoid(vectors)
        case "softmax":
            powers = np.exp(vectors - vectors.max(-1, keepdims=True))
            return powers / powers.sum(-1, keepdims=True)
        case _:
            return vectors


def _sigmoid(x: Vectors) -> Vectors:
    """The sigmoid, computed without a power that overflows."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
