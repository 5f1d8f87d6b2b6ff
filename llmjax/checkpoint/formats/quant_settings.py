"""Typed access to the settings of a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from llmjax.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class QuantSettings:
    """A JSON object of settings.

    Attributes:
        where: file and key that hold it, for messages.
        values: the object.
    """

    where: str
    values: Mapping[str, Any]

    def fail(self, problem: str, key: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {key} {problem}")

    def value(self, key: str) -> Any:
        """What a key holds, or None."""
        return self.values.get(key)

    def _typed(self, key: str, kind: type[T], what: str, default: T | None) -> T:
        value = self.values.get(key)
        if value is None:
            if default is None:
                self.fail("is missing", key)
            return default
        if type(value) is not kind:
            self.fail(f"is {str(value)[:60]!r}, not {what}", key)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._typed(key, bool, "true or false", default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, "a string", default).lower()

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in choices:
            self.fail(f"is {value[:60]!r}; supported are {', '.join(choices)}", key)
        return value

    def integer(self, *keys: str, choices: Sequence[int] | None = None, default: int | None = None) -> int:
        """A whole number under the first of `keys` (synonyms) that is there."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        value = self._typed(key, int, "a whole number", default)
        if choices is not None and value not in choices:
            self.fail(f"is {value}; supported are {', '.join(map(str, choices))}", key)
        return value

    def group_size(self, *keys: str) -> int:
        """Columns that share a scale; -1: all of a row."""
        value = self.integer(*keys)
        if value != -1 and value < 1:
            self.fail(f"is {value}, neither -1 nor a number of columns", keys[0])
        return value

    def child(self, key: str) -> QuantSettings | None:
        """An object within the object; None if it is not there."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(f"is {str(value)[:60]!r}, not an object", key)
        return replace(self, where=f"{self.where}.{key}", values=value)
