"""What is said to the process that tries grammars, and what it says, in frames."""

from __future__ import annotations

import marshal

from llmjax.constraints.matchers import Vocabulary

LAST, MORE = b"\x01", b"\x00"  # before an answer: whether the process ends behind it


def vocabulary_bytes(vocabulary: Vocabulary) -> bytes:
    """A vocabulary as a frame."""
    return marshal.dumps((list(vocabulary.tokens), list(vocabulary.special), list(vocabulary.eos)))


def vocabulary_of(frame: bytes | bytearray) -> Vocabulary:
    """Only for the process: data that anybody could have written must not be read so."""
    tokens, special, eos = marshal.loads(frame)
    return Vocabulary(tokens=tokens, special=special, eos=eos)
