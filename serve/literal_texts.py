"""Texts of users in which a special token that is spelled out stays text."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.tokenizer import Tokenizer
from llmjax.tokenizer.cutter import TokenCutter

ROLES = frozenset({"user", "tool"})  # their texts come neither from the model nor from whoever instructs it


class LiteralTexts:
    """Puts a mark into the spelling of each special token, so that a chat template can go on with the text, and takes
    all marks out where the prompt is encoded.

    Args:
        tokenizer: its special tokens must not be spelled in these texts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spelled = {id: tokenizer.id_to_token(id) for id in tokenizer.all_special_ids}
        # Nothing can be put into a single character; no known vocabulary has such a special token.
        self._spelled = {id: text for id, text in spelled.items() if len(text) > 1}
        self._cutter = TokenCutter({text: id for id, text in self._spelled.items()})
        self._mark = secrets.token_hex(16)  # no client can write it, and no template or JSON changes it

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages of a chat with marks in the texts of ``ROLES``."""
        return [
            {**message, **{key: self.marked(message[key]) for key in ("content", "name") if key in message}}
            if message["role"] in ROLES
            else dict(message)
            for message in messages
        ]

    def marked(self, value: Any) -> Any:
        """A text, or what holds texts, with marks."""
        match value:
            case str():
                return self._marked(value)
            case list():
                return [self.marked(item) for item in value]
            case dict():
                return {key: self.marked(item) for key, item in value.items()}
        return value

    def _marked(self, text: str) -> str:
        while True:  # once, but for tokens that overlap
            pieces = list(self._cutter.cut(text))
            if not any(isinstance(piece, int) for piece in pieces):
                return text
            text = "".join(piece if isinstance(piece, str) else self._broken(piece) for piece in pieces)

    def _broken(self, token: int) -> str:
        text = self._spelled[token]
        return f"{text[0]}{self._mark}{text[1:]}"

    def encode(self, text: str, *, add_special_tokens: bool, kept_for: str | None = None) -> tuple[list[int], str]:
        """The ids of a text with marks, and the text without them; arguments as for `Tokenizer.encode`."""
        tokenizer, parts = self._tokenizer, text.split(self._mark)
        if len(parts) == 1:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens, kept_for=kept_for), text
        around = tokenizer.encode("") if add_special_tokens else []
        before = around[:1] if around[:1] == [tokenizer.bos_token_id] else []
        ids = [id for part in parts for id in tokenizer.encode(part, add_special_tokens=False, kept_for=kept_for)]
        return [*before, *ids, *around[len(before) :]], "".join(parts)
