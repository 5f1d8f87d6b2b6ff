"""Log-probabilities in the three shapes of the API: chat, legacy completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmjax.outputs import TokenLogprobs

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer

FLOOR = -9999.0  # OpenAI's value for "very unlikely"; JSON has no -inf


class TokenNames:
    """How tokens are written in an answer.

    Args:
        tokenizer: None on a server without one; tokens are then always ids.
        as_ids: write ``token_id:17`` (``return_tokens_as_token_ids``).
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def raw(self, token_id: int) -> bytes | None:
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        raw = None if self._as_ids else self.raw(token_id)
        return f"token_id:{token_id}" if raw is None else raw.decode("utf-8", errors="replace")


def num_logprobs(*positions: Sequence[TokenLogprobs | None] | None) -> int:
    """How many there are, each of which takes a microsecond or two to be written."""
    return sum(len(position) for some in positions for position in some or () if position is not None)


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    *,
    names: TokenNames,
    top: int,
    named: Sequence[int] | None = None,
    with_ids: bool = False,
) -> dict[str, Any]:
    """OpenAI's ``ChoiceLogprobs`` for the sampled tokens that have log-probabilities.

    Args:
        top: how many of the most probable tokens to list.
        named: tokens to list instead.
        with_ids: entries have the tokens' ids as well, as llama-server's do.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = names.raw(token_id)
        return {
            **({"id": token_id} if with_ids else {}),
            "token": names.text(token_id),
            "bytes": None if raw is None else list(raw),
            "logprob": max(logprob, FLOOR),
        }

    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        best = [entry(other, logprob) for other, logprob in _listed(position, top=top, named=named)]
        content.append({**entry(token_id, position[token_id].logprob), "top_logprobs": best})
    return {"content": content, "refusal": None}


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its ``text``, in which special tokens may be shown or not.

    Tokens that the tokenizer has put before the text begin with it, those put after it at its end.
    """
    skip, before = False, tokenizer.decode(token_ids, skip_special_tokens=False).find(text)
    if before < 0:
        # Special tokens inside are left out, or the text was normalized and offsets are as near as can be.
        skip, before = True, 0
    _, offsets = tokenizer.detokenizer(skip_special_tokens=skip).whole(token_ids)
    return [min(max(offset - before, 0), len(text)) for offset in offsets[:-1]]


class LegacyLogprobs:
    """The completions endpoint's ``Logprobs``.

    Args:
        top: how many of the most probable tokens to list; the sampled one is listed always.
        named: tokens to list instead.
    """

    def __init__(self, names: TokenNames, *, top: int, named: Sequence[int] | None = None) -> None:
        self._names = names
        self._top = top
        self._named = named

    def format(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Some tokens, with the log-probabilities of each and where it begins in the text."""
        chosen: list[float | None] = []
        best: list[dict[str, float] | None] = []
        for token_id, position in zip(token_ids, logprobs, strict=True):
            chosen.append(None if position is None else max(position[token_id].logprob, FLOOR))
            best.append(None if position is None else self._best(token_id, position))
        tokens = [self._names.text(token_id) for token_id in token_ids]
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": list(offsets)}

    def _best(self, token_id: int, position: TokenLogprobs) -> dict[str, float]:
        shown = dict(_listed(position, top=self._top, named=self._named))
        shown.setdefault(token_id, position[token_id].logprob)
        named: dict[str, float] = {}
        for other, logprob in shown.items():  # two ids may share a text: the likelier one stays
            named.setdefault(self._names.text(other), max(logprob, FLOOR))
        return named


def prompt_logprobs(
    positions: Sequence[TokenLogprobs | None] | None, *, names: TokenNames
) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: a mapping from token id to its log-probability per position."""
    if positions is None:
        return None
    return [None if position is None else _by_id(position, names) for position in positions]


def _by_id(position: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": max(value.logprob, FLOOR), "rank": value.rank, "decoded_token": names.text(token_id)}
        for token_id, value in position.items()
    }


def _listed(position: Mapping[int, Any], *, top: int, named: Sequence[int] | None) -> list[tuple[int, float]]:
    """The tokens beside the sampled one; the prompt's have no named ones."""
    if named and all(token in position for token in named):
        return _ranked({token: position[token] for token in named})
    return _ranked(position)[:top]


def _ranked(position: Mapping[int, Any]) -> list[tuple[int, float]]:
    """Token ids, the most probable first."""
    return sorted(((i, value.logprob) for i, value in position.items()), key=lambda pair: -pair[1])
