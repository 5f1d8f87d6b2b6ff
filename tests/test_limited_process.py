"""A process at the other end of a socket: it starts bare, is told its limits, and ends when it is killed."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmjax.frames import receive_frame, send_frame
from llmjax.limited_process import LimitedProcess

ECHO = """
import json, os, socket, sys
connection = socket.socket(fileno=0)
text = json.dumps([json.loads(sys.argv[1]), dict(os.environ)]).encode()
connection.sendall(len(text).to_bytes(8, "little") + text)
while data := connection.recv(1000):
    connection.sendall(data)
"""


@dataclass(frozen=True)
class Limits:
    seconds: float = 1.5


@pytest.fixture
def process(tmp_path: Path) -> LimitedProcess:
    (tmp_path / "echo_frames.py").write_text(ECHO)
    return LimitedProcess("echo_frames", Limits(), environment={"PYTHONPATH": str(tmp_path)})


def test_it_knows_its_limits_and_its_environment_alone(process: LimitedProcess) -> None:
    told = receive_frame(process.socket)
    assert told is not None
    limits, environment = json.loads(told)
    assert limits == {"seconds": 1.5} and environment.keys() - {"LC_CTYPE"} == {"PYTHONPATH"}
    send_frame(process.socket, b"said")
    assert receive_frame(process.socket) == b"said"


def test_it_ends_when_it_is_killed(process: LimitedProcess) -> None:
    receive_frame(process.socket)
    assert process.alive and process.pid > 0
    process.kill()
    assert process.exit_code() == -signal.SIGKILL and not process.alive


def test_what_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        LimitedProcess("echo_frames", Limits(), environment={})
