"""Cut special tokens out of a text before it is tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import tokenizers
from tokenizers import models


class TokenCutter:
    """Splits text into stretches of plain text and the ids of tokens that are matched literally.

    The matching is the ``tokenizers`` library's (Aho-Corasick, leftmost and there longest), so thousands of tokens
    cost no more than one.

    Args:
        tokens: literal text to token id.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._ids = dict(tokens)
        # The model has one word, which stands for everything between the matches.
        self._matcher = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._matcher.add_special_tokens(
            [tokenizers.AddedToken(text, normalized=False, special=True) for text in self._ids if text]
        )

    def cut(self, text: str) -> Iterator[str | int]:
        """Yield the pieces of ``text`` in order: plain stretches as str, matched tokens as their id."""
        if not self._ids:
            if text:
                yield text
            return
        # A batch of one, because only batches let go of the interpreter lock.
        (matched,) = self._matcher.encode_batch([text])
        for start, end in matched.offsets:
            piece = text[start:end]
            yield self._ids.get(piece, piece)
