"""Settings as dataclass fields with type, help and spellings, and the conversion of text and YAML to their values."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union

from llmjax.config import Alias, Limits
from llmjax.durations import parse_duration
from llmjax.errors import ConfigError

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a settings class, with everything that a flag or a YAML key needs.

    Args:
        name: the field's name, and its key in YAML.
        kind: bool, int, float, str, list or dict.
        item: type of a list's items or of a dict's keys.
        optional: whether None is allowed.
        unit: "bytes", "tokens" or "seconds" if a value may be written as 4GiB, 8k or 5m.
        separator: separator of a list's items in text; None: there is none.
        several: whether several items of a list may follow one flag.
        joined: whether a list of integers is converted to text with commas between the items.
        words: other spellings of some values.
        section: heading in ``--help``.
        limits: range of its numbers; None: any.
    """

    name: str
    kind: type
    item: type
    optional: bool
    default: Any
    help: str
    aliases: tuple[Alias, ...] = ()
    choices: tuple[str, ...] | None = None
    unit: str | None = None
    separator: str | None = ","
    several: bool = False
    joined: bool = False
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    section: str | None = None
    limits: Limits | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def switched(self, alias: Alias, *, on: bool) -> Any:
        """The value that an alias for one value means when it is on or off."""
        if on:
            return alias.value
        return not alias.value if self.kind is bool else self.default

    @property
    def expected(self) -> str:
        """The type in words, for error messages."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        if self.kind is list:
            return f"a list of {words[self.item].split()[-1]}s"
        if self.kind is dict:
            return "a mapping" if self.item is str else "a mapping from integers"
        if self.unit == "bytes":
            return "a number of bytes such as 4GiB"
        if self.unit == "tokens":
            return "a number of tokens such as 4096 or 8k"
        if self.unit == "seconds":
            return "a duration such as 300, 5m or 1h30m (-1: for ever)"
        return words[self.kind]


def settings_of(cls: type, *, without: Collection[str] = ()) -> dict[str, Setting]:
    """The settings of a dataclass by name, in order; a field's metadata is made by ``llmjax.config.setting``.

    Args:
        without: fields that are not settings.

    Raises:
        ConfigError: a field has a type that settings cannot have.
    """
    hints = typing.get_type_hints(cls)
    found = {}
    section: str | None = None
    for field in dataclasses.fields(cls):
        section = field.metadata.get("section") or section  # the first field under a heading names it
        if field.name in without:
            continue
        kind, item, optional = _shape(hints[field.name], f"{cls.__name__}.{field.name}")
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        metadata = {key: field.metadata[key] for key in field.metadata if key not in ("help", "section")}
        found[field.name] = Setting(
            name=field.name,
            kind=kind,
            item=item,
            optional=optional,
            default=default,
            help=field.metadata.get("help", ""),
            section=section,
            **metadata,
        )
    return found


def parse_text(setting: Setting, text: str, *, source: str) -> Any:
    """Converts a command-line argument to a value.

    Args:
        source: name of the argument in errors, such as "--port".

    Raises:
        ConfigError: the text is not a value of the setting.
    """
    if text.strip().lower() in setting.words:
        return setting.words[text.strip().lower()]
    if setting.optional and setting.kind in (int, float) and text.lower() == "none":
        return None
    if setting.kind is list and not text.lstrip().startswith("["):
        items = text.split(setting.separator) if setting.separator else [text]
        return check_value(setting, [_number_or_text(item, setting.item) for item in items], source=source)
    if setting.kind in (list, dict):
        try:
            return check_value(setting, json.loads(text), source=source)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} must be {setting.expected} as JSON, not {text!r} ({error})") from None
    return check_value(setting, _number_or_text(text, setting.kind), source=source)


def check_value(setting: Setting, value: Any, *, source: str) -> Any:
    """Checks a value and converts it to the setting's type.

    Raises:
        ConfigError: it has another type; the message names source, value and expected type.
    """
    if value is None and setting.optional:
        return None
    if setting.words and (word := str(value).strip().lower()) in setting.words:
        return setting.words[word]
    try:
        result = _converted(setting, value)
    except (ValueError, OverflowError):  # OverflowError: an integer too large for a float
        raise ConfigError(f"{source} must be {setting.expected}, not {value!r}") from None
    if setting.choices and result not in setting.choices:
        raise ConfigError(f"{source} must be {setting.expected}, not {value!r}")
    return result


def spellings(settings: Iterable[Setting]) -> dict[str, tuple[Setting, Alias]]:
    """Every key allowed in YAML and keyword arguments, with its setting and the unit of its numbers."""
    return {
        alias.flag.removeprefix("--").replace("-", "_"): (setting, alias)
        for setting in settings
        for alias in (Alias(setting.flag), *setting.aliases)
    }


def collect(settings: Iterable[Setting], values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Checked values by field name, from a mapping whose keys may have dashes or be aliases.

    Args:
        source: origin of the mapping, for errors.

    Raises:
        ConfigError: a key is unknown (the message names the nearest one) or given twice, or a value has a wrong type.
    """
    keys = spellings(settings)
    collected: dict[str, Any] = {}
    for key, value in values.items():
        normal = key.replace("-", "_") if isinstance(key, str) else ""
        if normal not in keys:
            raise ConfigError(f"{source}: unknown key {key!r}{nearest(normal, keys)}")
        setting, alias = keys[normal]
        if setting.name in collected:
            raise ConfigError(f"{source}: {setting.name} is given twice, the second time as {key!r}")
        if alias.value is not None:
            if not isinstance(value, bool):
                raise ConfigError(f"{source}: {key} must be true or false, not {value!r}")
            collected[setting.name] = setting.switched(alias, on=value)
            continue
        checked = check_value(setting, value, source=f"{source}: {key}")
        collected[setting.name] = checked if checked is None or alias.unit == 1 else checked * alias.unit
    return collected


def make_config(cls: type[Config], values: Mapping[str, Any], *, source: str) -> Config:
    """Makes a settings object from keyword arguments, with the checks and spellings of YAML files.

    Raises:
        ConfigError: see ``collect``; or a value is out of range.
    """
    return cls(**collect(settings_of(cls).values(), values, source=source))


# Words in which names of opposite meaning differ.
OPPOSITES = ({"keep", "skip"}, {"enable", "disable"}, {"min", "max"}, {"include", "exclude"}, {"allow", "deny"})


def nearest(word: str, known: Iterable[str], *, similarity: float = 0.5) -> str:
    """The end of an error message about an unknown word: the most similar known one, if any is similar.

    Args:
        similarity: least similarity of the two words, from 0 to 1.
    """
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=similarity)
    meant = next((name for name in found if not _opposite(word, name)), None)
    return f"; did you mean {meant}?" if meant else ""


def _opposite(word: str, other: str) -> bool:
    """Whether two names are opposites, such as ``keep_special_tokens`` and ``skip_special_tokens``."""
    one, two = (set(re.split(r"[_-]+", name.lower())) for name in (word, other))
    return any((one ^ two) >= pair and len(one & pair) == 1 for pair in OPPOSITES)


def parse_quantity(text: str, *, unit: str) -> int:
    """An integer with an optional unit: 8k = 8,000, 8K = 8,192, and for bytes also 4GB = 4e9, 4GiB = 4 * 2**30.

    Lowercase letters are powers of 1000 and capitals powers of 1024, as in vLLM's flags.

    Raises:
        ValueError: the text is not such a number, or not an integer.
    """
    pattern = r"(\d+(?:_\d+)*(?:\.\d+)?)\s*(?:([kKmMgGtT])(i?[bB])?|[bB])?"
    match = re.fullmatch(pattern, text.strip(), re.ASCII)
    if match is None:
        raise ValueError(text)
    number, prefix, suffix = match.groups()
    if suffix and unit != "bytes":
        raise ValueError(text)
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    if suffix:
        base = 1024 if suffix.startswith("i") else 1000
    else:
        base = 1024 if prefix and prefix.isupper() else 1000
    whole, _, fraction = number.replace("_", "").partition(".")
    scaled, rest = divmod(int(whole + fraction) * base**power, 10 ** len(fraction))
    if rest:
        raise ValueError(text)
    return scaled


def _shape(hint: Any, where: str) -> tuple[type, type, bool]:
    """The kind, item type and optionality of a type hint."""
    options = [hint]
    if typing.get_origin(hint) in (types.UnionType, Union):
        options = list(typing.get_args(hint))
    optional = type(None) in options
    options = [option for option in options if option is not type(None)]
    if len(options) == 2 and options[0] is str:  # "str | Sequence[str]": a list that may be given as one item
        options = options[1:]
    kind = typing.get_origin(options[0]) or options[0]
    if len(options) == 1 and kind in (bool, int, float, str):
        return kind, kind, optional
    item = (typing.get_args(options[0]) or (Any,))[0]
    if len(options) == 1 and item in (int, float, str) and kind in (list, collections.abc.Sequence):
        return list, item, optional
    if len(options) == 1 and item in (int, str) and kind in (dict, collections.abc.Mapping):
        return dict, item, optional
    raise ConfigError(f"{where} has a type that settings cannot have: {hint}")


def _number_or_text(text: str, kind: type) -> Any:
    """Converts text to numbers and booleans; other text stays as it is, for ``check_value`` to refuse."""
    readers = {int: int, float: float, bool: {"true": True, "false": False}.__getitem__}
    try:
        return readers[kind](text)  # type: ignore[operator]
    except (KeyError, ValueError):
        return text


def _converted(setting: Setting, value: Any) -> Any:
    if setting.kind is list:
        items = value if isinstance(value, list | tuple) else [value]
        return [_scalar(setting.item, item, unit=None) for item in items]
    if setting.kind is dict:
        if not isinstance(value, dict):
            raise ValueError(value)
        if setting.item is int:  # JSON has no integer keys
            return {_scalar(int, _number_or_text(str(key), int), unit=None): value[key] for key in value}
        return {_scalar(str, key, unit=None): value[key] for key in value}
    if setting.joined and isinstance(value, list | tuple) and set(map(type, value)) == {int}:
        return ",".join(map(str, value))
    return _scalar(setting.kind, value, unit=setting.unit)


def _scalar(kind: type, value: Any, *, unit: str | None) -> Any:
    if kind is int and unit and isinstance(value, str):
        return parse_quantity(value, unit=unit)
    if kind is float and unit == "seconds" and isinstance(value, int | float | str) and not isinstance(value, bool):
        return parse_duration(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return float(value)
    if kind is not float and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ValueError(value)
