"""SentencePiece's ``ModelProto``, written byte by byte.

A GGUF file holds what a SentencePiece model holds: pieces, scores, types and a few switches. Put back into a
``ModelProto`` they run in the sentencepiece library itself, so the ids are its own by construction. Writing the
wire format here costs 20 lines and makes 262,144 pieces load in a fraction of a second, without protobuf.

Field numbers: google/sentencepiece, ``src/sentencepiece_model.proto``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5


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
class Pieces:
    """A vocabulary; the id of a piece is its position.

    Args:
        texts: V strings, none empty and none twice.
        scores: [V] numbers.
        types: [V] values of PieceType.
    """

    texts: Sequence[str]
    scores: np.ndarray
    types: np.ndarray


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


def _head(size: int) -> bytes:
    """What stands before a piece's text of ``size`` bytes: the lengths of the piece and of the text."""
    length = _varint(1 << 3 | _BYTES) + _varint(size)
    return _varint(1 << 3 | _BYTES) + _varint(len(length) + size + 7) + length


def model(
    pieces: Pieces, *, model_type: ModelType, byte_fallback: bool, whitespace_as_suffix: bool, normalizer_spec: bytes
) -> bytes:
    """A serialized ``ModelProto``."""
    texts = [text.encode() for text in pieces.texts]
    # After its text every piece has the same seven bytes but for their values: score and type.
    tails = np.empty((len(texts), 7), np.uint8)
    tails[:, 0] = 2 << 3 | _FLOAT
    tails[:, 1:5] = pieces.scores.astype("<f4").view(np.uint8).reshape(-1, 4)
    tails[:, 5] = 3 << 3 | _VARINT
    tails[:, 6] = pieces.types
    tail = tails.tobytes()
    # In front of it, what the length of the text decides.
    heads = {size: _head(size) for size in set(map(len, texts))}
    parts: list[bytes] = []
    for i, text in enumerate(texts):
        parts += (heads[len(text)], text, tail[7 * i : 7 * i + 7])
    trainer = _number(3, model_type) + _number(24, whitespace_as_suffix) + _number(35, byte_fallback)
    return b"".join([*parts, _data(2, trainer), normalizer_spec])


def pieces_of(serialized: bytes) -> Pieces:
    """The vocabulary of a serialized ``ModelProto`` that the library has accepted.

    Raises:
        ValueError: the bytes are not such a message.
    """
    texts, scores, types = [], [], []
    for field, message in _fields(serialized):
        if field == 1 and isinstance(message, bytes):
            piece = dict(_fields(message))
            texts.append(bytes(piece.get(1, b"")).decode())
            scores.append(np.frombuffer(piece.get(2, bytes(4)), "<f4")[0])
            types.append(PieceType(piece.get(3, PieceType.NORMAL)))
    return Pieces(texts, np.array(scores, np.float32), np.array(types, np.int32))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers of fields with an int for varints and bytes for all else."""
    pos = 0

    def varint() -> int:
        nonlocal pos
        value = shift = 0
        while True:
            byte = data[pos]
            pos += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    try:
        while pos < len(data):
            key = varint()
            if key & 7 == _VARINT:
                yield key >> 3, varint()
                continue
            size = {_DOUBLE: 8, _FLOAT: 4}.get(key & 7)
            if size is None and key & 7 != _BYTES:
                raise ValueError(f"wire type {key & 7} at byte {pos}")
            size = varint() if size is None else size
            if pos + size > len(data):
                raise ValueError(f"a field of {size} bytes at byte {pos} of {len(data)}")
            yield key >> 3, data[pos : pos + size]
            pos += size
    except IndexError:
        raise ValueError("the message ends inside a number") from None
