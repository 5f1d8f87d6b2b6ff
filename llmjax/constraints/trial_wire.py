"""The messages to and from the process that tries grammars, as frames."""

from __future__ import annotations

import marshal
import struct

from llmjax.constraints.matchers import Vocabulary

ERROR_BYTES = 4096  # of the library's objection; a pipe holds this many
NICENESS = 10  # of a trial that takes long

_CODE = struct.Struct("<i")


def vocabulary_bytes(vocabulary: Vocabulary) -> bytes:
    """A vocabulary as a frame."""
    return marshal.dumps((list(vocabulary.tokens), list(vocabulary.special), list(vocabulary.eos)))


def vocabulary_of(frame: bytes | bytearray) -> Vocabulary:
    """Reads a vocabulary. Only the trial process may use it: it is unsafe for data from others."""
    tokens, special, eos = marshal.loads(frame)
    return Vocabulary(tokens=tokens, special=special, eos=eos)


def written(code: int, error: bytes) -> bytes:
    """The result of a trial as a frame: exit status of its process (negative: the signal that killed it), and the
    library's objection to the grammar."""
    return _CODE.pack(code) + error


def read(frame: bytes | bytearray) -> tuple[int, str]:
    """Reads a frame made by ``written``."""
    return _CODE.unpack_from(frame)[0], bytes(frame[_CODE.size :]).decode(errors="replace")
