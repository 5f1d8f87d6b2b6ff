"""What is said to the process that tries grammars, and what it says: length-prefixed frames over a socket."""

from __future__ import annotations

import marshal
import socket
import struct

from llmjax.constraints.matchers import Vocabulary

LENGTH = struct.Struct("<Q")
LAST, MORE = b"\x01", b"\x00"  # before an answer: whether the process ends behind it


def send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(LENGTH.pack(len(frame)))
    connection.sendall(frame)  # not put together: it may be large


def receive(connection: socket.socket) -> bytes | None:
    """The next frame; None when the other side is gone."""
    header = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(header) < LENGTH.size:
        return None
    data = bytearray(LENGTH.unpack(header)[0])
    view = memoryview(data)
    while view:
        if not (count := connection.recv_into(view)):
            return None
        view = view[count:]
    return bytes(data)


def vocabulary_bytes(vocabulary: Vocabulary) -> bytes:
    """A vocabulary as a frame."""
    return marshal.dumps((list(vocabulary.tokens), list(vocabulary.special), list(vocabulary.eos)))


def vocabulary_of(frame: bytes) -> Vocabulary:
    """Only for the process: data that anybody could have written must not be read so."""
    tokens, special, eos = marshal.loads(frame)
    return Vocabulary(tokens=tokens, special=special, eos=eos)
