"""Token ids to text, whole or as they come."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from llmjax.tokenizer.pieces import PieceDecoder

# A character is at most four bytes, so the tail of a prompt that matters is at most three tokens long.
_PROMPT_TAIL = 4


class PieceTable:
    """The bytes of every token, worked out when first needed.

    Args:
        id_to_token: the vocabulary's string of an id, None where it has none.
        decoder: what a token's string stands for.
        special_ids: tokens that ``skip_special_tokens`` leaves out.
    """

    def __init__(
        self, id_to_token: Callable[[int], str | None], decoder: PieceDecoder, special_ids: frozenset[int]
    ) -> None:
        self.errors = decoder.errors
        self.special_ids = special_ids
        self._id_to_token = id_to_token
        self._decoder = decoder
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token inside a text; empty for an id without a token (padding rows of an embedding)."""
        try:
            return self._cache[token_id]
        except KeyError:
            return self._cache.setdefault(token_id, self._decode(token_id, first=False))

    def first(self, token_id: int) -> bytes:
        """The bytes of a token at the start of a text."""
        return self._decode(token_id, first=True)

    def longest(self, vocab_size: int) -> int:
        """Bytes of the longest of the ids below ``vocab_size``; keeps none of them."""
        return max((len(self._decode(token_id, first=False)) for token_id in range(vocab_size)), default=0)

    def all(self, vocab_size: int) -> list[bytes]:
        """The bytes of the ids below ``vocab_size``; keeps none of them."""
        return [self._decode(token_id, first=False) for token_id in range(vocab_size)]

    def exists(self, token_id: int) -> bool:
        return self._id_to_token(token_id) is not None

    def _decode(self, token_id: int, *, first: bool) -> bytes:
        token = self._id_to_token(int(token_id))  # NumPy's integers come too
        return b"" if token is None else self._decoder(token, first=first)


class IncrementalDetokenizer:
    """Turns a stream of token ids into a stream of text.

    Never gives out part of a character: bytes wait until the character is complete or cannot become one. The chunks
    joined, with ``finish``, equal ``Tokenizer.decode`` of all ids. Constant time a token.

    Args:
        table: bytes of the tokens.
        skip_special_tokens: leave special tokens out.
        shown: special tokens that are not left out.
        spaces_between_special_tokens: keep the space that word vocabularies put between neighboring special tokens.
        prompt_ids: tokens that come before; their text is not given out, but decides whether a leading space shows,
            and a character begun in them is finished here.
    """

    def __init__(
        self,
        table: PieceTable,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._table = table
        self._skip = table.special_ids - shown if skip_special_tokens else frozenset[int]()
        self._tight = table.special_ids if not spaces_between_special_tokens else frozenset[int]()
        self._after_special = False
        self._at_start = not any(i not in self._skip and table.exists(i) for i in prompt_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")(table.errors)
        for token_id in [i for i in prompt_ids[-4 * _PROMPT_TAIL :] if i not in self._skip][-_PROMPT_TAIL:]:
            self._after_special = token_id in self._tight
            self._decoder.decode(table[token_id])

    def add(self, ids: Iterable[int]) -> str:
        """The text that became certain with ``ids``; often empty, never half a character."""
        if self._at_start or self._tight:
            data = b"".join([self._bytes(i) for i in ids if i not in self._skip])
        else:
            table, skip = self._table, self._skip
            data = b"".join([table[i] for i in ids if i not in skip])
        return self._decoder.decode(data)

    def whole(self, ids: Iterable[int]) -> tuple[str, list[int]]:
        """The text of ``ids`` up to its end, and how many of its characters are complete before each of them and, in a
        last entry, before whatever follows."""
        pieces = [self.add((i,)) for i in ids]
        return "".join(pieces) + self.finish(), list(accumulate(map(len, pieces), initial=0))

    def finish(self) -> str:
        """The rest: replacement characters for a character that never got complete."""
        return self._decoder.decode(b"", True)

    def _bytes(self, token_id: int) -> bytes:
        special = token_id in self._tight
        if self._at_start and self._table.exists(token_id):
            self._at_start = False
            data = self._table.first(token_id)
        else:
            data = self._table[token_id]
            if special and self._after_special:
                data = data.removeprefix(b" ")
        self._after_special = special
        return data
