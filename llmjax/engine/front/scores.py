"""Scores of how well two texts fit: by a cross-encoder that reads both, or by the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmjax.engine.front.pairs import TextPair
from llmjax.engine.info import PoolerInfo
from llmjax.errors import InvalidRequest
from llmjax.outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from llmjax.pooling_params import PoolingTask


def text_pairs(
    first: str | Sequence[str],
    second: str | Sequence[str],
    *,
    instruction: str | None = None,
    chat_template: str | None = None,
) -> list[TextPair]:
    """Pairs of one text with each of the others, or of texts at the same place in both lists.

    Args:
        instruction, chat_template: the same for all pairs; see `TextPair`.

    Raises:
        InvalidRequest: there are none, or their numbers differ.
    """
    firsts = [first] if isinstance(first, str) else list(first)
    seconds = [second] if isinstance(second, str) else list(second)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if not firsts or len(firsts) != len(seconds):
        problem = f"{len(firsts)} and {len(seconds)} texts cannot be compared pair by pair"
        raise InvalidRequest(problem, field="text_2" if firsts else "text_1")
    return [TextPair(*pair, instruction, chat_template) for pair in zip(firsts, seconds, strict=True)]


def score_task(pooler: PoolerInfo | None) -> PoolingTask:
    """The task by which pairs are scored.

    Raises:
        InvalidRequest: the model cannot score pairs.
    """
    if pooler is None:
        raise InvalidRequest("this model generates text; it scores no pairs of texts (--runner pooling)")
    if pooler.task == "classify" and len(pooler.labels) != 1:
        raise InvalidRequest(f"the model has {len(pooler.labels)} labels; one that scores pairs of texts has one")
    return "score" if pooler.task == "classify" else "embed"


def pair_inputs(pairs: Sequence[TextPair], pooler: PoolerInfo | None) -> list[TextPair | str]:
    """The inputs of the model for some pairs: the pairs, or each text once.

    Raises:
        InvalidRequest: pairs have an instruction or a template, but the texts are read one by one.
    """
    if pooler is None or pooler.task == "classify":
        return list(pairs)
    for name in ("instruction", "chat_template"):
        if any(getattr(pair, name) is not None for pair in pairs):
            raise InvalidRequest(f"{name}: this model makes embeddings of texts, and reads no pairs", field=name)
    return list(dict.fromkeys(text for pair in pairs for text in (pair.first, pair.second)))


def scored(
    made: Sequence[PoolingRequestOutput], pairs: Sequence[TextPair], pooler: PoolerInfo | None
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
    return [_cosine(output_of[pair.first], output_of[pair.second]) for pair in pairs]


def _cosine(first: PoolingRequestOutput, second: PoolingRequestOutput) -> ScoringRequestOutput:
    error, score = first.error or second.error, float("nan")
    if error is None:
        a, b = first.outputs.data, second.outputs.data
        score = float(np.dot(a, b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
    return ScoringRequestOutput(
        request_id=first.request_id,
        outputs=ScoringOutput(score),
        prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        error=error,
    )
