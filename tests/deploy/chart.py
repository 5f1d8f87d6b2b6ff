"""Helm charts without Helm: the part of Go's templates that the chart in deploy/ keeps to. Whatever else stands in a
template is an error, so that tests see all of the chart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

TOKEN = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.S)
WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s|]+|\|')


class TemplateError(Exception):
    """A template holds what is not known here, or is not well formed."""


@dataclass(frozen=True)
class Scope:
    dot: Any
    root: dict[str, Any]


def render(chart: Path, *, release: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects of a chart.

    Args:
        values: values that differ from the chart's.
    """
    defaults = yaml.safe_load((chart / "values.yaml").read_text())
    if unknown := set(values) - set(defaults):
        raise TemplateError(f"values.yaml knows no {sorted(unknown)}")
    root = {"Values": merged(defaults, values), "Release": {"Name": release}}
    found: list[dict[str, Any]] = []
    for path in sorted((chart / "templates").glob("*.yaml")):
        text = "".join(_block(iter(_tokens(path.read_text())), Scope(root, root), True)[0])
        found += [made for made in yaml.safe_load_all(text) if made is not None]
    return found


def merged(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Lays values over defaults as Helm does: mappings are merged, all else is replaced."""
    return defaults | {
        name: merged(defaults[name], value)
        if isinstance(value, dict) and isinstance(defaults.get(name), dict)
        else value
        for name, value in values.items()
    }


def _tokens(text: str) -> list[tuple[str, str]]:
    """Text and actions, in turn, without the white space that actions trim."""
    found, end, trim = [], 0, False
    for match in TOKEN.finditer(text):
        before = text[end : match.start()]
        before = before.lstrip() if trim else before
        found += [("text", before.rstrip() if match[1] else before), ("action", match[2])]
        end, trim = match.end(), bool(match[3])
    rest = text[end:]
    return [*found, ("text", rest.lstrip() if trim else rest)]


def _block(tokens: Iterator[tuple[str, str]], scope: Scope, shown: bool) -> tuple[list[str], str]:
    """Output up to the action that ends the block, and that action."""
    out: list[str] = []
    for kind, content in tokens:
        name, _, rest = content.partition(" ")
        if kind == "text":
            out.append(content)
        elif name in ("end", "else"):
            return out, name
        elif name in ("if", "with"):
            value = _value(rest, scope) if shown else None
            inner = Scope(value, scope.root) if name == "with" else scope
            taken, end = _block(tokens, inner, shown and bool(value))
            other, end = _block(tokens, scope, shown and not value) if end == "else" else ([], end)
            _ended(end)
            out += (taken if value else other) if shown else []
        elif name == "range":
            body = list(_until_end(tokens))
            for item in _value(rest, scope) if shown else ():
                out += _block(iter([*body, ("action", "end")]), Scope(item, scope.root), True)[0]
        elif shown:
            out.append(_text(_value(content, scope)))
    return out, ""


def _ended(action: str) -> None:
    if action != "end":
        raise TemplateError("a block does not end")


def _until_end(tokens: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    depth = 1
    for kind, content in tokens:
        if kind == "action":
            depth += content.partition(" ")[0] in ("if", "with", "range")
            depth -= content == "end"
        if not depth:
            return
        yield kind, content
    raise TemplateError("a range does not end")


def _value(expression: str, scope: Scope) -> Any:
    """The value of a pipeline."""
    calls: list[list[str]] = [[]]
    for word in WORDS.findall(expression):
        if word == "|":
            calls.append([])
        else:
            calls[-1].append(word)
    value = _call(calls[0], [], scope)
    for call in calls[1:]:
        value = _call(call, [value], scope)
    return value


def _call(words: list[str], piped: list[Any], scope: Scope) -> Any:
    name, *arguments = words
    if not arguments and not piped and (name.startswith((".", '"')) or name.isdigit()):
        return _operand(name, scope)
    values = [*(_operand(word, scope) for word in arguments), *piped]
    match name, values:
        case "quote", [value]:
            return json.dumps(_text(value))
        case "kindIs", [kind, value]:
            return (kind == "string") == isinstance(value, str)
        case "toJson", [value]:
            return json.dumps(value, separators=(",", ":"))
        case "toYaml", [value]:
            return yaml.safe_dump(value, default_flow_style=False).rstrip("\n")
        case "nindent", [size, value]:
            return "\n" + "\n".join(" " * size + line for line in value.splitlines())
        case "eq", [first, second]:
            return first == second
        case "add", [first, second]:
            return first + second
        case "mul", [first, second]:
            return first * second
    raise TemplateError(f"{name} of {len(values)} arguments")


def _operand(word: str, scope: Scope) -> Any:
    if word.startswith('"'):
        return json.loads(word)
    if word.isdigit():
        return int(word)
    if not word.startswith("."):
        raise TemplateError(f"{word!r} is not an operand")
    value = scope.dot
    for name in filter(None, word.split(".")):
        value = value[name]
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and abs(value) >= 1e6:  # all numbers are Go's float64 there
        digits, _, exponent = f"{Decimal(repr(float(value))).normalize():e}".partition("e")
        return f"{digits}e{exponent[0]}{exponent[1:]:0>2}"
    return str(value)
