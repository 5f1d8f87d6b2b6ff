"""Systems that llmjax does not run on are told so in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import llmjax
from llmjax import cli
from llmjax.errors import ConfigError
from llmjax.system import processor_name


def test_windows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(["version"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "use WSL" in captured.err
    with pytest.raises(ConfigError, match="use WSL"):
        llmjax.LLM  # noqa: B018


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n", "AMD EPYC (Zen 4)"),
        ("cpu family\t: 25\nmodel\t\t: 99\nmodel name\t: AMD EPYC\n", "AMD EPYC (family 25, model 99)"),
        ("model name\t: Neoverse-N1\n", "Neoverse-N1"),
    ],
)
def test_a_processor_has_a_name_of_its_own(fields: str, name: str, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{fields}")
    assert processor_name(cpuinfo) == name
