"""Length-prefixed frames over a socket."""

from __future__ import annotations

import socket
import struct

LENGTH = struct.Struct("<Q")  # before a frame: its bytes


def send_frame(connection: socket.socket, frame: bytes) -> None:
    """Blocks until all of it is sent."""
    connection.sendall(LENGTH.pack(len(frame)))
    connection.sendall(frame)  # not put together: it may be large


def receive_frame(connection: socket.socket) -> bytearray | None:
    """The next frame; None when the other side is gone. Blocks."""
    header = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(header) < LENGTH.size:
        return None
    data = bytearray(LENGTH.unpack(header)[0])
    view = memoryview(data)
    while view:
        if not (count := connection.recv_into(view)):
            return None
        view = view[count:]
    return data
