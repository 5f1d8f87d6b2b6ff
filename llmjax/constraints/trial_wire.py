"""What is said to the process that tries grammars, and what it says, in frames."""

from __future__ import annotations

import marshal
import struct

from llmjax.constraints.matchers import Vocabulary

ERROR_BYTES = 4096  # of what the library says; a pipe holds as many
NICENESS = 10  # of what takes long

_CODE = struct.Struct("<i")


def vocabulary_bytes(vocabulary: Vocabulary) -> bytes:
    """A vocabulary as a frame."""
    return marshal.dumps((list(vocabulary.tokens), list(vocabulary.special), list(vocabulary.eos)))


def vocabulary_of(frame: bytes | bytearray) -> Vocabulary:
    """Only for the process: data that anybody could have written must not be read so."""
    tokens, special, eos = marshal.loads(frame)
    return Vocabulary(tokens=tokens, special=special, eos=eos)


def written(code: int, error: bytes) -> bytes:
    """How a trial has ended, as a frame: exit status of its process (negative: the signal that has killed it), and what
    the library says against the grammar."""
    return _CODE.pack(code) + error


def read(frame: bytes | bytearray) -> tuple[int, str]:
    """What ``written`` has written."""
    return _CODE.unpack_from(frame)[0], bytes(frame[_CODE.size :]).decode(errors="replace")
