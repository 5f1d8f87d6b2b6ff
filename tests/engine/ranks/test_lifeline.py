"""Connections of a process that is killed end at once, even if other processes have them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmjax.engine.ranks.lifeline import Lifeline

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is for Linux")

ROOT = Path(__file__).parents[3]
HOLDING = """
import socket, subprocess, sys, time
from llmjax.engine.ranks.lifeline import Lifeline
connection = socket.socket(fileno=int(sys.argv[1]))
# Somebody who has the connection, too: as if threads of this process were not ending.
other = subprocess.Popen(["sleep", "600"], pass_fds=[connection.fileno()])
lifeline = Lifeline([connection])
connection.sendall(f"{other.pid} {lifeline._process.pid} ".encode())
time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_connection_ends_with_its_process(sent: signal.Signals) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    with theirs:
        command = [sys.executable, "-c", HOLDING, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
    said = ""
    while said.count(" ") < 2:
        said += ours.recv(100).decode()
    other, lifeline = map(int, said.split())
    try:
        for harmless in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(lifeline, harmless)
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
        ours.settimeout(120)
        process.send_signal(sent)
        assert ours.recv(1) == b""
        os.kill(other, 0)  # it is there, and has the connection
    finally:
        os.kill(other, signal.SIGKILL)
        process.kill()
        process.wait()


def test_one_that_is_closed_leaves_the_connection_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lifeline = Lifeline([theirs])
        lifeline.close()
        lifeline.close()
        assert lifeline._process is not None and lifeline._process.wait(60) == -signal.SIGKILL
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
