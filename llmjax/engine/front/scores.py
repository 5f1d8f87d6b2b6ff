"""Scores of how well two texts fit: by a cross-encoder that reads both, or by comparing vectors of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmjax.engine.core.request import Vectors
from llmjax.engine.front.pairs import Page, Side, TextPair
from llmjax.engine.front.requests import PromptInput
from llmjax.engine.info import PoolerInfo
from llmjax.errors import InvalidRequest
from llmjax.models.layers.pooling import DOCUMENT, QUERY
from llmjax.outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from llmjax.pooling_params import PoolingTask

PoolingInput = PromptInput | TextPair | Side
"""What a model that makes vectors may be given."""
Content = str | Page | Mapping[str, Any]
"""A text, or a prompt with a picture."""


@dataclass(frozen=True)
class Compared:
    """Two texts or pages, and what they are judged by; see `TextPair` for the latter."""

    first: str | Page
    second: str | Page
    instruction: str | None = None
    chat_template: str | None = None


def compared(
    first: Content | Sequence[Content],
    second: Content | Sequence[Content],
    *,
    instruction: str | None = None,
    chat_template: str | None = None,
) -> list[Compared]:
    """Pairs of one text with each of the others, or of texts at the same place in both lists.

    Args:
        instruction, chat_template: the same for all pairs; see `TextPair`.

    Raises:
        InvalidRequest: there are none, or their numbers differ.
    """
    firsts, seconds = _contents(first), _contents(second)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if not firsts or len(firsts) != len(seconds):
        problem = f"{len(firsts)} and {len(seconds)} texts cannot be compared pair by pair"
        raise InvalidRequest(problem, field="text_2" if firsts else "text_1")
    return [Compared(*pair, instruction, chat_template) for pair in zip(firsts, seconds, strict=True)]


def _contents(given: Content | Sequence[Content]) -> list[str | Page]:
    several: Sequence[Content] = [given] if isinstance(given, str | Page | Mapping) else given
    return [Page(each) if isinstance(each, Mapping) else each for each in several]


def score_task(pooler: PoolerInfo | None) -> PoolingTask:
    """The task by which pairs are scored.

    Raises:
        InvalidRequest: the model cannot score pairs.
    """
    if pooler is None:
        raise InvalidRequest("this model generates text; it scores no pairs of texts (--runner pooling)")
    if pooler.task == "classify" and len(pooler.labels) != 1:
        raise InvalidRequest(f"the model has {len(pooler.labels)} labels; one that scores pairs of texts has one")
    if pooler.task == "classify":
        return "score"
    return "token_embed" if pooler.kind == "each" else "embed"


def pair_inputs(pairs: Sequence[Compared], pooler: PoolerInfo | None) -> list[TextPair | Side]:
    """The inputs of the model for some pairs: the pairs, or each side once.

    Raises:
        InvalidRequest: pairs have an instruction or a template, but the texts are read one by one; or pages, but they
            are read together.
    """
    if pooler is None or pooler.task == "classify":
        return [_text_pair(pair) for pair in pairs]
    for name in ("instruction", "chat_template"):
        if any(getattr(pair, name) is not None for pair in pairs):
            raise InvalidRequest(f"{name}: this model makes embeddings of texts, and reads no pairs", field=name)
    return list(dict.fromkeys(side for pair in pairs for side in _sides(pair, pooler)))


def _text_pair(pair: Compared) -> TextPair:
    if isinstance(pair.first, Page) or isinstance(pair.second, Page):
        field = "text_1" if isinstance(pair.first, Page) else "text_2"
        raise InvalidRequest("this model scores pairs of texts; it sees no pictures in them", field=field)
    return TextPair(pair.first, pair.second, pair.instruction, pair.chat_template)


def _sides(pair: Compared, pooler: PoolerInfo) -> tuple[Side, Side]:
    """What is read of a pair. Texts are queries and documents to models that compare by all tokens."""
    names = [name if pooler.kind == "each" and name in pooler.prompts else None for name in (QUERY, DOCUMENT)]
    return Side(pair.first, names[0]), Side(pair.second, names[1])


def scored(
    made: Sequence[PoolingRequestOutput], pairs: Sequence[Compared], pooler: PoolerInfo | None
) -> list[ScoringRequestOutput]:
    """The pairs' scores.

    Args:
        made: outputs of the requests that `pair_inputs` made, in order.
    """
    if pooler is None or pooler.task == "classify":
        scores = [float("nan") if output.error else float(output.outputs.data[0]) for output in made]
        return [
            output.into(ScoringRequestOutput, ScoringOutput(score)) for output, score in zip(made, scores, strict=True)
        ]
    output_of = dict(zip(pair_inputs(pairs, pooler), made, strict=True))
    compare = max_sim if pooler.kind == "each" else _cosine
    scored_pairs = []
    for pair in pairs:
        first, second = (output_of[side] for side in _sides(pair, pooler))
        error = first.error or second.error
        score = float("nan") if error is not None else compare(first.outputs.data, second.outputs.data)
        scored_pairs.append(
            ScoringRequestOutput(
                request_id=first.request_id,
                outputs=ScoringOutput(score),
                prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
                num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
                error=error,
            )
        )
    return scored_pairs


def max_sim(query: Vectors, document: Vectors) -> float:
    """The sum over a query's tokens of each one's largest product with a token of the document (late interaction).

    Formula: Khattab and Zaharia 2020, arXiv:2004.12832, section 3.3.

    Args:
        query, document: f32 [tokens, size], vectors of length one.
    """
    return float((query @ document.T).max(axis=1).sum())


def _cosine(first: Vectors, second: Vectors) -> float:
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(np.dot(first, second) / max(lengths, 1e-12))
