"""Files of pictures that callers name: what is none is refused before it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmjax.errors import InvalidRequest
from llmjax.media.files import file_content


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"12345")
    assert file_content(path, most=5) == file_content(str(path), most=5) == b"12345"
    with pytest.raises(InvalidRequest, match=r"^the file has more than 4 bytes$"):
        file_content(path, most=4)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/dev/zero", "is a pipe, socket or device, not a file"),
        ("/", "is a folder, not a file"),
        ("/nowhere/a.png", "the file cannot be read: No such file or directory"),
        ("a\0.png", "the file cannot be read: .*null"),
        ("~nobody_of_this_name/a.png", "the file cannot be read: .*home directory"),
        ("a" * 5000, "the file cannot be read: File name too long"),
    ],
)
def test_what_is_no_file_is_refused(path: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        file_content(path, most=5)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="is a pipe"):
        file_content(tmp_path / "pipe", most=5)
