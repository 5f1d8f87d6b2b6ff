"""What shells complete: the scripts run in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llmjax.cli import main
from llmjax.cli.completion import SHELLS, script

# The shell's own part is played: it says which words are on the line, and prints what it is offered.
PLAYED = {
    "bash": 'COMP_WORDS=(llmjax "$@"); COMP_CWORD=$#; _llmjax; printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": 'words=(llmjax "$@"); CURRENT=$(($# + 1)); compadd() { shift; print -l -- ${(M)@:#${words[CURRENT]}*}; }; '
    "_files() { :; }; _llmjax",
}
BEFORE = {"bash": "", "zsh": "compdef() { :; }; "}


@pytest.fixture(scope="module", params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(script(request.param))
    return request.param, path


def completed(shell: tuple[str, Path], *words: str) -> list[str]:
    name, path = shell
    quiet = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"]}[name]
    code = f"{BEFORE[name]}source {path}; {PLAYED[name]}"
    done = subprocess.run(
        [name, *quiet, "-c", code, name, *words], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["se"], ["serve"]),
        (["bench", "la"], ["latency"]),
        (["bench", "sweep", "plot"], ["plot", "plot_pareto"]),
        (["serve", "--max-model"], ["--max-model-len"]),
        (["serve", "--port", "8000", "--max-num-s"], ["--max-num-seqs"]),
        (["rm", "serve", "--y"], ["--yes"]),
        (["serve", "--no-we"], ["--no-web"]),
        (["bench", "nothing", "--xyz"], []),
    ],
)
def test_what_is_offered(shell: tuple[str, Path], words: list[str], offered: list[str]) -> None:
    assert completed(shell, *words) == offered


def test_all_commands_are_offered_first(shell: tuple[str, Path]) -> None:
    assert {"serve", "chat", "bench", "pull", "list", "rm", "--help"} <= {*completed(shell, "")}


def test_it_is_put_where_the_shell_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert main(["--install-completion"]) == 0
    assert (tmp_path / ".zfunc" / "_llmjax").read_text().startswith("#compdef llmjax\n")
    assert "~/.zshrc" in capsys.readouterr().out
    assert main(["completion", "bash", "--install"]) == 0
    assert (tmp_path / ".local/share/bash-completion/completions/llmjax").exists()
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    capsys.readouterr()
    assert main(["completion"]) == 1
    assert "llmjax completion bash or zsh" in capsys.readouterr().err
