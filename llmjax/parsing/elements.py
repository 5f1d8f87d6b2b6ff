"""Arguments written as elements, one in another, as JSON of the types that a schema names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmjax.parsing.schemas import MAX_REFERENCES, json_of_text, json_types, without_references

MAX_DEPTH = 64


@dataclass
class _Element:
    name: str
    text: list[str] = field(default_factory=list)
    children: list[_Element] = field(default_factory=list)


def json_of_elements(text: str, *, before_tags: str, schema: Any) -> str:
    """The elements that are whole, as a JSON object; what is not one is left out.

    Args:
        before_tags: what stands before each tag.
        schema: schema of the object.
    """
    tag = re.compile(re.escape(before_tags) + r"<(/?)([^<>]{1,256})>")
    open_ones = [_Element("")]
    at = 0
    for match in tag.finditer(text):
        open_ones[-1].text.append(text[at : match.start()])
        at = match.end()
        closing, name = match.groups()
        if not closing:
            open_ones.append(_Element(name))
        elif len(open_ones) > 1 and open_ones[-1].name == name:
            element = open_ones.pop()
            if len(open_ones) <= MAX_DEPTH:
                open_ones[-1].children.append(element)
    return _object(open_ones[0].children, schema, schema)


def _json(element: _Element, schema: Any, root: Any) -> str:
    types = json_types(schema, root)
    if not element.children:
        text = "".join(element.text)
        if types and not text.strip() and types & {"array", "object"} and "string" not in types:
            return "[]" if "array" in types else "{}"
        return json.dumps(text, ensure_ascii=False) if schema is None else json_of_text(text, types)
    if "array" in types if types is not None else all(child.name == "item" for child in element.children):
        inner = _part(schema, root, "items")
        return f"[{', '.join(_json(child, inner, root) for child in element.children)}]"
    return _object(element.children, schema, root)


def _object(children: list[_Element], schema: Any, root: Any) -> str:
    properties = _part(schema, root, "properties") or {}
    values: dict[str, list[str]] = {}
    for child in children:
        inner = properties.get(child.name) if isinstance(properties, Mapping) else None
        values.setdefault(child.name, []).append(_json(child, inner, root))
    pairs = [
        f"{json.dumps(name, ensure_ascii=False)}: {some[0] if len(some) == 1 else '[' + ', '.join(some) + ']'}"
        for name, some in values.items()
    ]
    return "{" + ", ".join(pairs) + "}"


def _part(schema: Any, root: Any, key: str) -> Any:
    """What a schema, or one of its choices, says under ``key``."""
    schema = without_references(schema, root, references=MAX_REFERENCES)
    if not isinstance(schema, Mapping):
        return None
    if key in schema:
        return schema[key]
    choices = schema.get("anyOf") or schema.get("oneOf")
    for choice in choices[:MAX_REFERENCES] if isinstance(choices, list) else ():
        choice = without_references(choice, root, references=MAX_REFERENCES)
        if isinstance(choice, Mapping) and key in choice:
            return choice[key]
    return None
