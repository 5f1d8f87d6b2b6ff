"""Frames come as they were sent, and a side that goes in the middle of one is gone."""

from __future__ import annotations

import socket
import threading

import pytest

from llmjax.frames import LENGTH, receive_frame, send_frame

FRAMES = [b"", b"a", bytes(range(256)) * 20_000]  # the last one is more than a socket holds


def test_frames_come_as_they_were_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: [send_frame(theirs, frame) for frame in FRAMES])
        sender.start()
        assert [receive_frame(ours) for _ in FRAMES] == FRAMES
        sender.join()


@pytest.mark.parametrize("sent", [b"", LENGTH.pack(5)[:3], LENGTH.pack(5), LENGTH.pack(5) + b"four"])
def test_a_frame_that_is_cut_is_none(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(sent)
        assert receive_frame(ours) is None
