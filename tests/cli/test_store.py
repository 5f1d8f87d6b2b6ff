"""``llmjax pull``, ``list`` and ``rm`` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmjax.checkpoint.pulled import PulledModel, PulledModels
from llmjax.checkpoint.resolve import resolve
from llmjax.cli import main
from llmjax.cli.show import split_name
from llmjax.cli.store import size
from llmjax.errors import CheckpointError
from tests.checkpoint.test_store import package, repository
from tests.pulled.hosts import tiny_gguf


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


def test_what_servers_have_pulled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, pulled = ["--download-dir", str(tmp_path)], PulledModels(tmp_path / "pulled")
    folder, broken = (tmp_path / "pulled" / "ollama.com" / "library" / name / "1b" for name in ("tiny", "other"))
    for each in (folder, broken):
        each.mkdir(parents=True)
    num_bytes = len(tiny_gguf(folder / "model.gguf"))
    (broken / "model.gguf.part").write_bytes(b"GGUF")
    own = {"source": "ollama.com/library/tiny:1b", "folder": "ollama.com/library/tiny/1b"}
    for name in ("tiny:1b", "tiny:copy"):
        pulled.put(PulledModel(name=name, model=str(folder / "model.gguf"), **own))
    assert main(["list", *where]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["pulled://tiny:1b", "GGUF", *size(num_bytes).split()] in [row[:4] for row in rows]
    assert ["pulled://ollama.com/library/other/1b", "(incomplete)", "4", "B"] in [row[:4] for row in rows]
    assert main(["show", "tiny:1b", *where]) == 0
    printed = capsys.readouterr()
    assert "llama" in printed.out and printed.err.startswith("To serve it: llmjax serve pulled://tiny:1b ")
    assert resolve("pulled://tiny:1b", download_dir=str(tmp_path)) == folder / "model.gguf"
    assert main(["rm", "tiny:2b", "--yes", *where]) == 1
    assert "did you mean pulled://tiny:1b?" in capsys.readouterr().err
    assert main(["rm", "tiny:1b", "other", "--yes", *where]) == 1
    assert main(["rm", "tiny:1b", "pulled://ollama.com/library/other/1b", "--yes", *where]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "pulled://tiny:1b is removed, another name has the same files."
    assert second == "pulled://ollama.com/library/other/1b is removed, 4 B are free."
    assert (folder / "model.gguf").exists() and not broken.parent.exists() and pulled.find("tiny:1b") is None
    assert main(["rm", "tiny:copy", "--yes", *where]) == 0
    assert capsys.readouterr().out == f"pulled://tiny:copy is removed, {size(num_bytes)} are free.\n"
    assert {path.name for path in (tmp_path / "pulled").iterdir()} == {"pulled.json", "pulled.json.lock"}
    with pytest.raises(CheckpointError, match="'pulled://tiny:1b' is not on this machine"):
        resolve("pulled://tiny:1b", download_dir=str(tmp_path))


def test_one_model_is_shown_with_its_license(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--download-dir", str(cache)]
    files = {
        "a-Q4_K_M.gguf": b"GGUF",
        "a-Q8_0.gguf": b"GGUF" * 3,
        "mmproj-a.gguf": b"",
        "README.md": b"---\nlicense: mit\n---\n",
    }
    repository(cache, "org/quants", files)
    assert main(["show", "org/quants", *where]) == 0
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert ["file", "a-Q4_K_M.gguf", "(4", "B)"] in rows and ["file", "a-Q8_0.gguf", "(12", "B)"] in rows
    assert ["license", "mit"] in rows and "mmproj" not in printed.out
    assert printed.err == f"To serve it: llmjax serve org/quants:a-Q4_K_M.gguf --download-dir {cache}\n"
    assert main(["show", "small-1.0-abc", "--json", *where]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["whole"], shown["num_bytes"]) == (False, 1001) and "problem" in shown["content"]
    assert main(["show", "org/dens", *where]) == 1
    assert "did you mean org/dense?\n  hint: llmjax list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/name", ("org/name", "")),
        ("org/name:Q4_K_M", ("org/name", "Q4_K_M")),
        ("modelscope://org/name:q8.gguf", ("modelscope://org/name", "q8.gguf")),
        ("pypi://a==1.0/m.gguf", ("pypi://a==1.0/m.gguf", "")),
    ],
)
def test_a_file_of_a_model_stands_after_a_colon(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name) == parts


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


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (98_362_432, "98.4 MB"), (7.5e9, "7.50 GB"), (1200, "1.2 kB")]
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text
