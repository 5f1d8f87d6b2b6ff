"""``llmjax completion``: what a shell needs to complete commands and their flags."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from llmjax.cli.commands import COMMANDS, Group
from llmjax.cli.parser import Parser
from llmjax.errors import ConfigError

SHELLS = ("bash", "zsh")
PLACES = {
    "bash": "~/.local/share/bash-completion/completions/llmjax",
    "zsh": "~/.zfunc/_llmjax",
}
HINTS = {
    "bash": "New shells complete llmjax, if the package bash-completion is installed.",
    "zsh": "Before compinit in ~/.zshrc there must be: fpath+=~/.zfunc",
}

BASH = """\
_llmjax() {
  local path= word words=
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$path $word" in @PATHS@) path="$path $word" ;; esac
  done
  case "$path" in
@WORDS@
  esac
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _llmjax llmjax
"""
ZSH = """\
#compdef llmjax
_llmjax() {
  local way= word known=
  for word in "${(@)words[2,CURRENT-1]}"; do
    case "$way $word" in (@PATHS@) way="$way $word" ;; esac
  done
  case "$way" in
@WORDS@
  esac
  compadd -- ${=known}
  _files
}
if [ "$funcstack[1]" = _llmjax ]; then _llmjax "$@"; else compdef _llmjax llmjax; fi
"""


def main(argv: list[str]) -> int:
    """Prints the script for a shell, or puts it where the shell looks for it.

    Raises:
        ConfigError: the shell is not known, or the file cannot be written.
    """
    parser = Parser(
        prog="llmjax completion",
        description="Print the script by which a shell completes commands and flags: source <(llmjax completion bash)",
    )
    parser.add_argument("shell", nargs="?", choices=SHELLS, help="the shell (default: the one that SHELL names)")
    parser.add_argument("--install", action="store_true", help="write it to where new shells find it")
    values = parser.parse(argv)
    shell = values.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise ConfigError(f"which shell? llmjax completion {' or '.join(SHELLS)}")
    text = script(shell)
    if not values.install:
        print(text, end="")
        return 0
    path = Path(PLACES[shell]).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    print(f"{path} is written. {HINTS[shell]}")
    return 0


def script(shell: str) -> str:
    """The script for ``bash`` or ``zsh``. It holds all words, so that completing starts no Python."""
    words = dict(_words("", COMMANDS))
    paths = "|".join(f'"{path}"' for path in words if path)
    variable = {"bash": "words", "zsh": "known"}[shell]
    mark = {"bash": "", "zsh": "("}[shell]
    cases = "\n".join(f'    {mark}"{path}") {variable}="{" ".join(some)}" ;;' for path, some in words.items())
    text = {"bash": BASH, "zsh": ZSH}[shell]
    return text.replace("@PATHS@", paths).replace("@WORDS@", cases)


def _words(path: str, group: Group) -> Iterator[tuple[str, list[str]]]:
    """What may follow each command: names of other commands, or flags."""
    yield path, [*group.commands, "--help"]
    for name, command in group.commands.items():
        inside = f"{path} {name}"
        if isinstance(command, Group):
            yield from _words(inside, command)
        else:
            yield inside, _flags(command.module)


def _flags(module: str) -> list[str]:
    """The flags of a command, as its own help lists them."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help", "all"])
    lines = (line for line in printed.getvalue().splitlines() if line.startswith("  -"))
    return sorted({flag for line in lines for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line[:200])})
