"""Where prompts come from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from llmjax.cli.prompts import read_prompts
from llmjax.errors import ConfigError


def test_arguments_files_and_lines(tmp_path: Path) -> None:
    text = tmp_path / "essay.txt"
    text.write_text("one\n\ntwo \n")
    assert read_prompts(["a", "b"], file=None, lines=False) == ["a", "b"]
    assert read_prompts([], file=str(text), lines=False) == ["one\n\ntwo "]
    assert read_prompts([], file=str(text), lines=True) == ["one", "two "]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (None, "-"):
        monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\n"))
        assert read_prompts([], file=file, lines=False) == ["Once upon"]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('"text"\n{"prompt": "a", "id": 7}\n\n{"prompt": [1, 2]}\n{"prompt_token_ids": [3]}\n')
    assert read_prompts([], file=str(path), lines=False) == ["text", "a", [1, 2], [3]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":1: is not JSON"),
        ("7", ":1: expected a text"),
        ('{"text": "a"}', ":1: expected a text"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', ":1: expected a text"),
        ('{"prompt_token_ids": "a"}', ":1: a prompt is a text or a list of token ids"),
        ('{"prompt": [true]}', ":1: a prompt is a text or a list of token ids"),
        ("", ": no prompt in it"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError) as error:
        read_prompts([], file=str(path), lines=False)
    assert str(error.value).startswith(str(path) + message)


def test_two_sources_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not from both"):
        read_prompts(["a"], file="x", lines=False)
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts([], file=str(tmp_path / "none"), lines=False)
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(ConfigError, match="standard input: no prompt in it"):
        read_prompts([], file=None, lines=False)
