"""What becomes of a flag of another program: a setting of ours, nothing, or a sentence that says what to use."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmjax.errors import ConfigError
from llmjax.settings import Setting, check_value, parse_text


class Takes(enum.Enum):
    """What follows a flag."""

    NOTHING = "nothing"
    SWITCH = "nothing, and there is a --no- form"
    VALUE = "a value"
    OPTIONAL = "a value or nothing"
    VALUES = "one or more values"


EMPTY = frozenset({"", "none", "null", "{}", "[]"})  # what changes nothing, whatever the flag


@dataclass(frozen=True, kw_only=True)
class ForeignFlag:
    """One flag of another program, and the answer to it.

    At most one of ``setting``, ``note`` and ``refusal`` says what happens to values that are not neutral; beside a
    setting, ``note`` is of the neutral ones. A flag with none of them is one of ours, read as it is.

    Args:
        spellings: its names, with dashes.
        takes: what may follow it; a switch has the values true and false.
        neutral: values, as text, that change nothing here.
        setting: field of ours that it sets.
        key: key of the setting's mapping, if it sets only that.
        words: our values for some of its own.
        unit: what its numbers count, in the setting's unit.
        note: why values are accepted although nothing comes of them.
        refusal: what to use instead.
    """

    spellings: tuple[str, ...]
    takes: Takes = Takes.VALUE
    neutral: frozenset[str] = frozenset()
    setting: str | None = None
    key: str | None = None
    words: Mapping[str, Any] = field(default_factory=dict)
    unit: int = 1
    note: str = ""
    refusal: str = ""

    @property
    def ours(self) -> bool:
        return not (self.setting or self.note or self.refusal or self.neutral)

    @property
    def names(self) -> list[str]:
        """The flag's names as keys of YAML and keyword arguments."""
        return [name[2:].replace("-", "_") for name in self.spellings if name.startswith("--")]

    def answer(self, value: Any, *, source: str, settings: Mapping[str, Setting]) -> Answer:
        """What a value comes to.

        Args:
            value: text from a command line, or a value from YAML or Python.
            source: what to call the flag in an error or a note.
            settings: ours, by name.

        Raises:
            ConfigError: the value is refused, or is not one of the setting's.
        """
        text = plain(value)
        if self.setting is None:
            if text in EMPTY or text in self.neutral:
                return Answer()
            if self.refusal:
                raise ConfigError(f"{source}: {self.refusal}")
            return Answer(note=f"{source}: {self.note}" if self.note else "")
        if value is None or text in self.neutral:
            return Answer(note=f"{source}: {self.note}" if self.note and value is not None else "")
        if text in self.words:
            value = self.words[text]
        setting = settings.get(self.setting)
        if setting is None:
            raise ConfigError(f"{source}: {self.setting} is a setting of `llmjax serve`")
        if self.key is not None:
            return Answer({self.setting: {self.key: _json(value)}})
        if setting.kind is list and setting.separator and isinstance(value, list) and set(map(type, value)) == {str}:
            value = setting.separator.join(value)
        if isinstance(value, str):
            checked = parse_text(setting, value, source=source)
        else:
            checked = check_value(setting, value, source=source)
        return Answer({self.setting: checked if checked is None or self.unit == 1 else checked * self.unit})


@dataclass(frozen=True)
class Answer:
    """What a flag comes to: values of settings, and a line to print."""

    values: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def plain(value: Any) -> str:
    """A value as text that compares equal however it was written: 1, "1" and 1.0; false and "False"; {} and "{}"."""
    if isinstance(value, str):
        value = _json(value)
    if value is None:
        return ""
    if isinstance(value, set | frozenset | tuple):
        value = list(value)
    if isinstance(value, bool | list | dict):
        return json.dumps(value, default=str)
    if isinstance(value, int | float):
        return f"{value:g}"
    return str(value).strip().lower()


def merge(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds settings to others; of mappings, the keys."""
    for name, value in more.items():
        before = values.get(name)
        values[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value


def _json(value: Any) -> Any:
    """Text as the JSON value that it is, if it is one."""
    if not isinstance(value, str):
        return value
    word = value.strip()
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+)", word, re.ASCII):
        return float(word)  # JSON knows neither 1. nor .5
    try:
        return json.loads(word.lower() if word.lower() in ("true", "false") else word)
    except (ValueError, RecursionError):
        return value
