"""Results of sweeps, read back: a row of values for each run, chosen, rounded and put into groups."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmjax.errors import ConfigError
from llmjax.text_file import read_text

Row = Mapping[str, Any]
Group = tuple[tuple[str, str], ...]  # names of variables, and what they are in it

ORDERS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
)
CONDITION = re.compile(r"\s*([^=!<>]+?)\s*(==|!=|<=|>=|<|>)\s*([^=!<>]*?)\s*")
INFINITE = ("inf", "-inf", "nan")  # as text, for JSON has no such numbers


def read_rows(folder: Path) -> list[Row]:
    """The runs of all sweeps in a folder, by the paths of their results.

    Raises:
        ConfigError: there are none, or a file holds something else.
    """
    rows: list[Row] = []
    for path in sorted(folder.rglob("summary.json")):
        try:
            content = json.loads(read_text(path))
        except ValueError as error:
            raise ConfigError(f"{path}: is not JSON ({error})") from None
        if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
            raise ConfigError(f"{path}: expected a list of objects, one a run")
        rows += [{key: float(v) if v in INFINITE else v for key, v in row.items()} for row in content]
    if not rows:
        raise ConfigError(f"{folder}: no results of a sweep (summary.json) are in it")
    return rows


def value_of(row: Row, name: str) -> Any:
    """A variable of a run, however the dashes of a flag are written; None: the run has none."""
    return next((row[key] for key in (name, name.replace("-", "_"), name.replace("_", "-")) if key in row), None)


def number_of(row: Row, name: str) -> float | None:
    """The same, where it must be a number.

    Raises:
        ConfigError: it is none.
    """
    value = value_of(row, name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{name} is {value!r} in a result, where a number is needed")
    return None if value is None or math.isnan(value) else float(value)


def check_known(rows: Sequence[Row], names: Sequence[str]) -> None:
    """Refuses a variable that no run has.

    Raises:
        ConfigError: names it, and those that there are.
    """
    for name in names:
        if all(value_of(row, name) is None for row in rows):
            available = ", ".join(sorted({key for row in rows for key in row}))
            raise ConfigError(f"no result has {name!r}; they have: {available}")


@dataclass(frozen=True)
class Condition:
    """What runs must be to count.

    Args:
        name: name of the variable.
        sign: ``==``, ``!=`` or one of ``ORDERS``.
        wanted: what it is compared with; for ``==`` and ``!=`` it need not be a number.
    """

    name: str
    sign: str
    wanted: str

    @classmethod
    def of(cls, text: str) -> Condition:
        """The condition that a text such as ``max_concurrency<1000`` states.

        Raises:
            ConfigError: the text is not a condition.
        """
        match = CONDITION.fullmatch(text)
        condition = None if match is None else cls(match[1], match[2], match[3].strip("'\""))
        if condition is None or (condition.sign in ORDERS and _number(condition.wanted) is None):
            raise ConfigError(f"--filter-by must be NAME==VALUE, !=, <=, >=, < or > NUMBER, not {text!r}")
        return condition

    def holds(self, row: Row) -> bool:
        """Whether the run counts; one without the variable does where it must be something else alone."""
        if self.sign in ORDERS:
            value, wanted = number_of(row, self.name), _number(self.wanted)
            return value is not None and wanted is not None and ORDERS[self.sign](value, wanted)
        return _same(value_of(row, self.name), self.wanted) == (self.sign == "==")


@dataclass(frozen=True)
class Bins:
    """Values that are made multiples of one number, so that points close together become one.

    Args:
        name: name of the variable.
        size: the number.
    """

    name: str
    size: float

    @classmethod
    def of(cls, text: str) -> Bins:
        """The bins that a text such as ``request_throughput%1`` describes.

        Raises:
            ConfigError: the text does not describe bins.
        """
        name, sign, size = text.partition("%")
        number = _number(size)
        if not name.strip() or not sign or number is None or not 0 < number < math.inf:
            raise ConfigError(f"--bin-by must be NAME%SIZE, with a size above 0, not {text!r}")
        return cls(name.strip(), number)

    def applied(self, row: Row) -> Row:
        """The run with the multiple below its value."""
        value = number_of(row, self.name)
        if value is None or math.isinf(value):
            return row
        return {**row, next(key for key in row if _plain(key) == _plain(self.name)): value // self.size * self.size}


def grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[Group, list[Row]]:
    """Runs by what these variables are in them, in the order in which they come."""
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple((name, _text(value_of(row, name))) for name in names), []).append(row)
    return groups


def label(group: Group, *, between: str = ", ") -> str:
    """A group, for people."""
    return between.join(f"{name}={value}" for name, value in group)


def _text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _same(value: Any, wanted: str) -> bool:
    number = _number(wanted)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number is not None and value == number
    return value is not None and _text(value).lower() == wanted.lower()  # True of Python's is JSON's true


def _plain(name: str) -> str:
    return name.replace("-", "_")
