"""What is not a regular file is refused at once: opening a pipe would wait for a writer."""

from __future__ import annotations

import os
import shutil
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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 1234\n", "a pointer of Git LFS"),
        (b"<!DOCTYPE html>\n<html><head><title>Log in</title>", "an HTML page"),
        (b"\n  <html>Too many requests</html>", "an HTML page"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.gguf"])
def test_what_stands_in_for_a_file_is_named(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    for each in LLAMA.iterdir():
        shutil.copy(each, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: is {says}, not the file itself"):
        open_checkpoint(tmp_path / name if name.endswith(".gguf") else tmp_path)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            ", but adapter_config.json: it is an adapter, not a model",
        ),
        (["pytorch_model-00001-of-00002.bin", "tokenizer.json"], ", but pytorch_model-00001-of-00002.bin: PyTorch's"),
        (["pytorch_model.bin.index.json"], ", but pytorch_model.bin.index.json: PyTorch's"),
        (["consolidated.00.pth"], ", but consolidated.00.pth: PyTorch's pickled weights are not read"),
    ],
)
def test_what_there_is_instead_of_a_model_is_named(names: list[str], says: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"holds neither a config\.json nor a \.gguf file{says}"):
        resolve(tmp_path)
    shutil.copy(LLAMA / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=rf"nor model\.safetensors\.index\.json{says}"):
        open_checkpoint(resolve(tmp_path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("weights.safetensors", ", but weights.safetensors, which must have one of these names"),
        ("README.md", "; other weight files are not read"),
    ],
)
def test_weights_under_no_known_name(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"holds neither a config\.json nor a \.gguf file$"):  # whatever else
        resolve(tmp_path)
    shutil.copy(LLAMA / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=rf"nor model\.safetensors\.index\.json{says}"):
        open_checkpoint(resolve(tmp_path))
