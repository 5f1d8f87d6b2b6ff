"""Golden checkpoints: archives that unpack to the folders that tests read."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import GOLDEN, POOLED, TESTS, pack, unpacked


def written(folder: Path, text: str) -> Path:
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text(text)
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def test_archives_are_unpacked_once_and_again_when_they_change(tmp_path: Path) -> None:
    archives, parent = tmp_path / "archives", tmp_path / "build" / "golden"
    archives.mkdir()
    pack(written(tmp_path / "a", "first"), archives / "llama.zip")
    first = unpacked(archives, parent)
    assert (first / "llama" / "config.json").read_text() == "first"
    assert (first / "llama" / "1_Pooling" / "config.json").read_text() == "{}"
    (first / "llama" / "seen").touch()
    assert unpacked(archives, parent) == first and (first / "llama" / "seen").exists()
    pack(written(tmp_path / "b", "second"), archives / "llama.zip")
    (parent / ".part" / "gpt2").mkdir(parents=True)  # of a process that was killed
    second = unpacked(archives, parent)
    assert (second / "llama" / "config.json").read_text() == "second"
    assert sorted(path.name for path in second.iterdir()) == ["llama"]
    assert not first.exists()


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    for name in "ab":
        pack(written(tmp_path / name, "same"), tmp_path / f"{name}.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_every_archive_is_a_checkpoint() -> None:
    for folder, archives in ((GOLDEN, "models/golden"), (POOLED, "engine/golden/pooling")):
        packed = {path.stem for path in (TESTS / archives).glob("*.zip")}
        assert packed and {path.name for path in folder.iterdir()} == packed
        for name in packed:
            assert {"config.json", "model.safetensors", "golden.npz"} <= {p.name for p in (folder / name).iterdir()}
