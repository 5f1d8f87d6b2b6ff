"""Validated reading of config.json: a value of the wrong kind is an error that names the key, not a surprise later."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmjax.models.errors import UnsupportedModel


class _Given(Mapping[str, Any]):
    """The keys of an object whose value is not null."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __contains__(self, key: object) -> bool:
        return key in self._values and self._values[str(key)] is not None

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._values if self._values[key] is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Fields:
    """The keys of one JSON object, with the defaults that hold where a key is missing.

    Args:
        values: the object as read from the file.
        defaults: what a missing key means; a key in neither mapping reads as null.
        name: how error messages call the object.
        aliases: other names of keys, by the name that callers ask for; the first one present counts.
        max_model_len: longest sequence that will be served, in tokens; None: the longest that the model was made for.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    name: str = "config.json"
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    max_model_len: int | None = None

    def get(self, key: str) -> Any:
        shown = self._shown(key)
        return self.values[shown] if shown in self.values else self.defaults.get(key)

    def without_nulls(self) -> Fields:
        """The same, where null means what a missing key does."""
        return replace(self, values=_Given(self.values))

    def _shown(self, key: str) -> str:
        """The name that the object has for a key."""
        return next((name for name in self.aliases.get(key, ()) if name in self.values), key)

    def error(self, key: str, problem: str) -> UnsupportedModel:
        """An error to raise about one key; ``problem`` completes "<file>: <key> = <value> ..."."""
        shown = repr(self.get(key))
        name = self._shown(key)
        name = name if name.isprintable() else repr(name)  # a line break would make two lines of the error
        return UnsupportedModel(f"{self.name}: {name} = {shown if len(shown) < 80 else shown[:76] + ' ...'} {problem}")

    def integer(self, key: str, *, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(key, f"must be an integer from {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        return None if self.get(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, *, zero: bool = False) -> float:
        """A positive, finite number; ``zero``: or 0."""
        value = self.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (0 < value <= sys.float_info.max or (zero and value == 0)):
            raise self.error(key, "must be 0 or a positive number" if zero else "must be a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def numbers(self, key: str, *, count: int, zero: bool = False) -> tuple[float, ...]:
        values = self.get(key)
        if not isinstance(values, list | tuple) or len(values) != count:
            raise self.error(key, f"must be a list of {count} numbers")
        return tuple(Fields({key: value}, name=self.name).number(key, zero=zero) for value in values)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def choice(self, key: str, choices: Iterable[str]) -> str:
        value = self.get(key)
        if not isinstance(value, str) or value not in set(choices):
            raise self.error(key, f"is not supported; supported are {', '.join(sorted(choices))}")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, "must be a text")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A JSON object; null reads as an empty one."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        return value or {}

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or null for none."""
        value = self.get(key)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        return tuple(Fields({key: token}, name=self.name).integer(key, minimum=0) for token in ids)

    def indices(self, key: str) -> tuple[int, ...]:
        """A list of numbers from 0 on, or null for none."""
        values = self.get(key)
        if values is not None and not isinstance(values, list | tuple):
            raise self.error(key, "must be a list of integers")
        return tuple(Fields({key: value}, name=self.name).integer(key, minimum=0) for value in values or ())

    def require(self, key: str, *neutral: Any) -> None:
        """Refuses a key that would change the mathematics in a way the model does not implement.

        Args:
            neutral: the values that change nothing; null always is one.
        """
        value = self.get(key)
        if value is not None and value not in neutral:
            raise self.error(key, "is not supported")

    def only(self, allowed: Iterable[str]) -> None:
        """Refuses keys that nobody reads."""
        for key, value in self.values.items():
            if value is not None and key not in set(allowed):
                raise self.error(key, f"is not supported here; supported keys are {', '.join(sorted(allowed))}")
