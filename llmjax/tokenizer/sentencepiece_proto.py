"""SentencePiece's ``ModelProto``, written byte by byte.

A GGUF file holds what a SentencePiece model holds: pieces, scores, types and a few switches. Put back into a
``ModelProto`` they run in the sentencepiece library itself, so the ids are its own by construction. Writing the
wire format here costs 20 lines and makes 262,144 pieces load in a fraction of a second, without protobuf.

Field numbers: google/sentencepiece, ``src/sentencepiece_model.proto``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

_VARINT, _BYTES, _FLOAT = 0, 2, 5


class PieceType(IntEnum):
    """Types of pieces; GGUF's ``tokenizer.ggml.token_type`` uses the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    UNIGRAM = 1
    BPE = 2


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    type: PieceType


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _data(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def normalizer(*, add_dummy_prefix: bool, remove_extra_whitespaces: bool | None = None, charsmap: bytes = b"") -> bytes:
    """A ``normalizer_spec`` field.

    Protobuf merges repeated messages and the last value wins, so appending this to a serialized model overrides it.

    Args:
        add_dummy_prefix: put ▁ in front of the text.
        remove_extra_whitespaces: merge runs of spaces and strip the ends; None: leave as it is.
        charsmap: the compiled table of character replacements; empty: none.
    """
    spec = _number(3, add_dummy_prefix)
    if remove_extra_whitespaces is not None:
        spec += _number(4, remove_extra_whitespaces)
    if charsmap:
        spec += _data(2, charsmap)
    return _data(3, spec)


def model(
    pieces: Iterable[Piece],
    *,
    model_type: ModelType,
    byte_fallback: bool,
    whitespace_as_suffix: bool,
    normalizer_spec: bytes,
) -> bytes:
    """A serialized ``ModelProto``; the id of a piece is its position."""
    type_field = {t: _number(3, t) for t in PieceType}
    score_tag = _varint(2 << 3 | _FLOAT)
    pack = struct.Struct("<f").pack
    parts = []
    for piece in pieces:
        body = _data(1, piece.text.encode()) + score_tag + pack(piece.score) + type_field[piece.type]
        parts.append(_data(1, body))
    trainer = _number(3, model_type) + _number(24, whitespace_as_suffix) + _number(35, byte_fallback)
    return b"".join([*parts, _data(2, trainer), normalizer_spec])
