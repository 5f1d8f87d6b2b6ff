"""Parameters of a sweep: JSON files of combinations, and commands with them in place."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmjax.errors import ConfigError
from llmjax.text_file import read_text

NAME = "_benchmark_name"  # the key of a combination's name where they stand in a list
MOST_CHARS = 120  # of a name in a path


@dataclass(frozen=True)
class Parameters:
    """One combination.

    Args:
        values: by flag, without the dashes in front; in its name dashes or underscores.
        given_name: what it is called; empty: by its values.
    """

    values: Mapping[str, Any]
    given_name: str = ""

    @property
    def name(self) -> str:
        """For people, and unique among those of a file."""
        return self.given_name or "-".join(f"{key}={_text(value)}" for key, value in self.values.items())

    def get(self, key: str) -> Any:
        """A value by its flag, however that is written."""
        return next((value for name, value in self.values.items() if _dashed(name) == _dashed(key)), None)

    def applied(self, command: Sequence[str]) -> list[str]:
        """The command with the flags in place of those that it has, or at its end."""
        words = list(command)
        for key, value in self.values.items():
            flag = "--" + _dashed(key)
            plain = isinstance(value, bool) and "." not in key
            new = [flag if value else f"--no-{flag[2:]}"] if plain else [flag, _text(value)]
            names = {flag, f"--no-{flag[2:]}"} if plain else {flag}
            at = next((i for i, word in enumerate(words) if "--" + _dashed(word.split("=")[0][2:]) in names), None)
            if at is None:
                words += new
            else:
                words[at : at + (1 if plain or "=" in words[at] else 2)] = new
        return words


def read_parameters(path: str | None) -> list[Parameters]:
    """The combinations of a file: a list of objects, or an object of them by name. No file: one that changes nothing.

    Raises:
        ConfigError: the file holds something else, or two combinations have one name.
    """
    if path is None:
        return [Parameters({})]
    try:
        content = json.loads(read_text(Path(path)))
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from None
    if isinstance(content, dict):
        content = [{NAME: name, **values} if isinstance(values, dict) else values for name, values in content.items()]
    if not isinstance(content, list) or not content or not all(isinstance(one, dict) for one in content):
        raise ConfigError(f"{path}: expected a list of objects, one a combination, or an object of them by name")
    combinations = [
        Parameters({key: value for key, value in one.items() if key != NAME}, str(one.get(NAME, ""))) for one in content
    ]
    names = [one.name for one in combinations]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: two combinations are called {twice}")
    return combinations


def path_name(text: str) -> str:
    """A text as the name of a file, different for different texts."""
    safe = re.sub(r"[^\w.=+-]", "_", text)
    return safe if safe == text and len(text) <= MOST_CHARS else f"{safe[:MOST_CHARS]}-{zlib.crc32(text.encode()):08x}"


def _dashed(key: str) -> str:
    """The name of a flag; keys within its value stay as they are."""
    name, dot, rest = key.partition(".")
    return name.replace("_", "-") + dot + rest


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
