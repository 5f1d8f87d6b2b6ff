"""What is not a regular file is refused at once: opening a pipe would wait for a writer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.files import map_file
from llmjax.checkpoint.resolve import resolve
from llmjax.errors import CheckpointError
from tests.checkpoints import GOLDEN

LLAMA = GOLDEN / "llama"


def test_bytes_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "full").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    assert map_file(tmp_path / "empty") == b""
    assert map_file(tmp_path / "full")[:] == map_file(tmp_path / "link")[:] == b"abc"
    with pytest.raises(CheckpointError, match="absent: cannot be opened: No such file"):
        map_file(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="is a folder, not a file"):
        map_file(tmp_path)


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_a_model_that_is_a_pipe_or_device(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is neither a file nor a folder"):
        resolve(tmp_path / name)
    with pytest.raises(CheckpointError, match="/dev/zero is neither a file nor a folder"):
        resolve("/dev/zero")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipes_among_the_files_of_a_model(name: str, tmp_path: Path) -> None:
    for part in ("config.json", "model.safetensors"):
        if part != name:
            (tmp_path / part).symlink_to(LLAMA / part)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(resolve(tmp_path))


def test_a_gguf_file_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model-Q4_0.gguf")
    with pytest.raises(CheckpointError, match=r"model-Q4_0.gguf: is a pipe, socket or device, not a file"):
        open_checkpoint(resolve(tmp_path))
