"""Systems that llmjax does not run on are told so in one line."""

from __future__ import annotations

import sys

import pytest

import llmjax
from llmjax import cli
from llmjax.errors import ConfigError


def test_windows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(["version"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "use WSL" in captured.err
    with pytest.raises(ConfigError, match="use WSL"):
        llmjax.LLM  # noqa: B018
