"""Which files are still those that they were."""

import os
from pathlib import Path

import pytest

from llmjax.checkpoint.identity import fingerprint, identity


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def test_what_is_read_stays_what_it_was(file: Path) -> None:
    before = identity(file.parent)
    file.read_bytes()
    (file.parent / "notes.txt").write_text("not a weight")
    assert before
    assert identity(file.parent) == before


def test_what_is_written_in_place_is_another_even_with_its_old_date(file: Path) -> None:
    before, status = identity(file.parent), file.stat()
    with file.open("r+b") as opened:
        opened.write(b"WEIGHTS")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity(file.parent) != before


def test_all_parts_of_a_split_file_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    before = identity(parts[0])
    assert len(before) == 2
    parts[1].write_bytes(b"GGUF and more")
    assert identity(parts[0]) != before


def test_what_is_not_there_has_none(tmp_path: Path) -> None:
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert identity(tmp_path) == ()
    assert identity(tmp_path / "model.gguf") == ()


def test_copies_have_the_same_fingerprint_and_other_weights_of_that_size_another(tmp_path: Path) -> None:
    content = bytearray(os.urandom(2**20))
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        (folder / "config.json").write_text(folder.name)
        (folder / "gone.safetensors").symlink_to(folder / "nowhere")
    first, second = map(fingerprint, folders)
    assert first == second
    found = {first}
    for at in (0, len(content) // 2, len(content) - 1):
        changed = content.copy()
        start = max(0, at - 2**15)
        changed[start : at + 2**15] = os.urandom(len(changed[start : at + 2**15]))
        (folders[1] / "model.safetensors").write_bytes(changed)
        found.add(fingerprint(folders[1]))
    assert len(found) == 4
    blob = tmp_path / "sha256-0"  # a GGUF file of any name
    blob.write_bytes(content)
    assert fingerprint(blob) == first
