"""From token strings to bytes of text: what each kind of vocabulary writes down for a token.

A decoder of the ``tokenizers`` library works on a whole list of tokens. Here each kind is a function of one token
and of whether it is the first, so that text can be streamed token by token in constant time and still equal the
decode of the whole list.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

from llmjax.errors import TokenizerError

SPACE = "▁"  # U+2581, SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _one_mark_a_byte(error: UnicodeError) -> tuple[str, int]:
    """SentencePiece writes U+FFFD once for each byte that is not part of a character; Python's handler writes fewer."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("llmjax.one_mark_a_byte", _one_mark_a_byte)


class PieceDecoder(Protocol):
    """How tokens are written; ``errors`` is the codec error handler for bytes that are not UTF-8."""

    @property
    def errors(self) -> str: ...

    def __call__(self, token: str, *, first: bool) -> bytes:
        """The text of ``token`` in UTF-8, which may end or begin inside a character.

        Args:
            token: the vocabulary's string.
            first: no token precedes it in the text.
        """


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: Latin-1's own where it prints, the others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteLevelPieces:
    """GPT-2's alphabet; a token with any other character (added tokens) stands for its own text."""

    errors = "replace"

    def __init__(self) -> None:
        self._bytes = byte_level_alphabet()

    def __call__(self, token: str, *, first: bool) -> bytes:
        try:
            return bytes([self._bytes[char] for char in token])
        except KeyError:
            return token.encode()


@dataclass(frozen=True)
class SpacePieces:
    """SentencePiece-style pieces: a mark for the space, optional byte tokens, a leading space that is not shown.

    Args:
        replace: (from, to) in the order they are applied.
        byte_fallback: tokens ``<0xXX>`` stand for one byte.
        strip_first: leading spaces to drop from the first token; -1: its every mark, as Metaspace does.
    """

    replace: tuple[tuple[str, str], ...] = ((SPACE, " "),)
    byte_fallback: bool = True
    strip_first: int = 0
    errors: str = "llmjax.one_mark_a_byte"

    def __call__(self, token: str, *, first: bool) -> bytes:
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            text = bytes([int(match[1], 16)])
        else:
            for old, new in self.replace:
                token = token.replace(old, "" if first and self.strip_first < 0 else new)
            text = token.encode()
        if first:
            for _ in range(self.strip_first):
                text = text.removeprefix(b" ")
        return text


@dataclass(frozen=True)
class WordPieces:
    """Words joined by spaces; continuations carry a prefix (``##``).

    Args:
        prefix: marks a continuation; None: every token is a word.
        cleanup: undo the space before punctuation and English contractions, token by token as ``tokenizers`` does.
    """

    prefix: str | None = "##"
    cleanup: bool = False
    errors: str = "replace"

    _CLEANUP = (
        *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
        (" ' ", "'"),
        *((f" {ending}", ending) for ending in ("n't", "'m")),
        (" do not", " don't"),
        *((f" {ending}", ending) for ending in ("'s", "'ve", "'re")),
    )

    def __call__(self, token: str, *, first: bool) -> bytes:
        if not first:
            if self.prefix is not None and token.startswith(self.prefix):
                token = token[len(self.prefix) :]
            else:
                token = " " + token
        if self.cleanup:
            for old, new in self._CLEANUP:
                token = token.replace(old, new)
        return token.encode()


def decoder_of(tokenizer: tokenizers.Tokenizer, *, source: str) -> PieceDecoder:
    """The per-token form of a ``tokenizers`` decoder.

    Raises:
        TokenizerError: the decoder is of a kind that has none.
    """
    if tokenizer.decoder is None:
        return WordPieces(prefix=None)
    spec = json.loads(tokenizer.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    # Fuse only joins tokens, which happens anyway; ByteLevel needs nothing else around it.
    steps = [step for step in steps if step["type"] != "Fuse"]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelPieces()
    if kinds == ["WordPiece"]:
        return WordPieces(prefix=steps[0]["prefix"], cleanup=steps[0]["cleanup"])
    if kinds == ["Metaspace"]:
        hidden = steps[0].get("prepend_scheme", "always") != "never"
        return SpacePieces(((steps[0]["replacement"], " "),), False, -1 if hidden else 0)
    readers: dict[str, Callable[[dict[str, Any]], Any]] = {
        "Replace": lambda step: step["pattern"].get("String"),
        "ByteFallback": lambda step: True,
        "Strip": lambda step: step["content"] == " " and step["stop"] == 0,
    }
    if not all(kind in readers and readers[kind](step) for kind, step in zip(kinds, steps, strict=True)):
        raise TokenizerError(f"{source}: decoder {' + '.join(kinds)} is not supported")
    return SpacePieces(
        tuple((step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"),
        "ByteFallback" in kinds,
        sum(step["start"] for step in steps if step["type"] == "Strip"),
    )
