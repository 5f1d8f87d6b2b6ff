"""The commands and programs that pages show, as a reader would type them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.import_graph import ROOT

PAGES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("kernels/*/README.md"),
    ]
)
SHELLS = {"bash", "sh", "shell"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"(?:[\w-]+)?\$ (.*)")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Something that a page tells a reader to run.

    Attributes:
        page: the page's path in the repository.
        line: the line that it begins at, from 1.
        text: the command with its further lines, or the program.
        kind: ``shell`` or ``python``.
    """

    page: str
    line: int
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.text.split())[:100]}"

    @property
    def words(self) -> list[str]:
        """The words of a command, without its comments."""
        return shlex.split(self.text.replace("\\\n", " "), comments=True)


def shown(page: Path) -> Iterator[Shown]:
    """All commands and Python programs of a page, in their order.

    Raises:
        ValueError: a command's quotes are never closed.
    """
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        first = text.count("\n", 0, fence.start()) + 2
        name, where = fence[1], str(page.relative_to(ROOT))
        if name == "python":
            yield Shown(page=where, line=first, text=fence[2], kind="python")
        elif name == "console" or name in SHELLS:
            for line, command in _commands(fence[2].splitlines(), every_line=name in SHELLS):
                yield Shown(page=where, line=first + line, text=command, kind="shell")


def _commands(lines: list[str], *, every_line: bool) -> Iterator[tuple[int, str]]:
    """Commands with the lines that they begin at; what is neither a command nor its further line is its output."""
    waiting = list(enumerate(lines))
    while waiting:
        number, line = waiting.pop(0)
        prompt = PROMPT.match(line)
        command = line if every_line else prompt[1] if prompt else ""
        if not command.strip() or command.lstrip().startswith("#"):
            continue
        while not _is_whole(command):
            if not waiting:
                raise ValueError(f"the command never ends: {command}")
            command += "\n" + waiting.pop(0)[1]
        yield number, command


def _is_whole(command: str) -> bool:
    """Whether a shell would run a command and not wait for its next line."""
    if command.endswith("\\"):
        return False
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # a quotation that is not closed
        return False
    return sum(word.count("(") - word.count(")") for word in words if "$(" not in word and "'" not in word) <= 0
