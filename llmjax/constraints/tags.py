"""Structural tags: free text with constrained parts between texts that begin and end them.

The older format is vLLM's (``structures`` and ``triggers``), the newer one XGrammar's (``format``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.constraints.closing import closed
from llmjax.constraints.lark import Markers, lark_of, lark_regex
from llmjax.errors import InvalidRequest

MAX_DEPTH = 32  # nested formats


def tag_grammar(tag: Any, *, options: Mapping[str, Any], markers: Markers, close: bool = False) -> str:
    """Converts a structural tag to Lark.

    Args:
        tag: the tag as JSON.
        options: options of schemas, see ``json_options``.
        close: whether objects have the properties that their schemas name, and no others.

    Raises:
        InvalidRequest: it is not a structural tag.
    """
    if not isinstance(tag, dict):
        raise InvalidRequest("is not an object")
    writer = _Writer(options, markers, close)
    if "format" in tag:
        start = writer.format(tag["format"], depth=0)
    else:
        structures = _list(tag, "structures")
        tags = [
            {"begin": part.get("begin"), "content": {"type": "json_schema", "json_schema": part.get("schema", True)}}
            | {"end": part.get("end", "")}
            for part in map(_object, structures)
        ]
        start = writer.format({"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}, depth=0)
    return "\n".join([f"start: {start}", *writer.rules, "TEXT: /(?s:.*)/", ""])


class _Writer:
    def __init__(self, options: Mapping[str, Any], markers: Markers, close: bool) -> None:
        self._options = options
        self._close = close
        self._markers = markers
        self.rules: list[str] = []
        self._count = 0

    def format(self, value: Any, *, depth: int) -> str:
        """An expression that matches a format."""
        value = _object(value)
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"formats are nested deeper than {MAX_DEPTH}")
        match value.get("type"):
            case "const_string":
                return self._text(value, "value")
            case "json_schema":
                return self._json(value.get("json_schema", True))
            case "any_text":
                return "TEXT"
            case "any_tokens":  # special tokens too
                return self._rule("(TEXT | <[*]>)*")
            case "regex":
                return lark_regex(_string(value, "pattern"))
            case "grammar":
                return self._rule(f"%lark {{\n{lark_of(_string(value, 'grammar'))}\n}}")
            case "sequence":
                return self._joined(" ", value, depth)
            case "or":
                return self._joined(" | ", value, depth)
            case "tag":
                return self._tag(value, depth)
            case "triggered_tags":
                return self._triggered(value, depth)
            case "tags_with_separator":
                return self._separated(value, depth)
            case kind:
                raise InvalidRequest(f"the format {str(kind)[:40]!r} is not supported")

    def _rule(self, body: str) -> str:
        self._count += 1
        name = f"part_{self._count}"
        self.rules.append(f"{name}: {body}")
        return name

    def _json(self, schema: Any) -> str:
        if isinstance(schema, dict):
            schema = {**(closed(schema) if self._close else schema), "x-guidance": self._options}
        return self._rule(f"%json {json.dumps(schema)}")

    def _text(self, value: Mapping[str, Any], key: str) -> str:
        text = _string(value, key)
        return self._markers.literal(text) if text else '""'

    def _joined(self, separator: str, value: Mapping[str, Any], depth: int) -> str:
        parts = [self.format(part, depth=depth + 1) for part in _list(value, "elements")]
        return self._rule(separator.join(parts))

    def _tag(self, value: Mapping[str, Any], depth: int, *, without: str = "") -> str:
        begin, end = _string(value, "begin"), value.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if not all(isinstance(text, str) for text in ends) or not ends:
            raise InvalidRequest("the end of a tag must be a text")
        content = _object(value.get("content"))
        if content.get("type") == "any_text" and all(ends):
            inner = " | ".join(self._rule_until(text) for text in ends)
        else:
            last = " | ".join(self._markers.literal(text) if text else '""' for text in ends)
            inner = f"{self.format(content, depth=depth + 1)} ({last})"
        rest = begin[len(without) :]
        return self._rule(f"{self._markers.literal(rest) if rest else ''} ({inner})")

    def _rule_until(self, marker: str) -> str:
        self._count += 1
        name = f"part_{self._count}"
        self.rules.append(self._markers.text_until(name, marker))
        return name

    def _triggered(self, value: Mapping[str, Any], depth: int) -> str:
        triggers, tags = _list(value, "triggers"), [_object(tag) for tag in _list(value, "tags")]
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise InvalidRequest("triggers must be texts that are not empty")
        calls = []
        for trigger in triggers:
            own = [tag for tag in tags if _string(tag, "begin").startswith(trigger)]
            if not own:
                raise InvalidRequest(f"no tag begins with the trigger {trigger[:40]!r}")
            inner = " | ".join(self._tag(tag, depth, without=trigger) for tag in own)
            calls.append(self._rule(f"{self._rule_until(trigger)} ({inner})"))
        if lost := [tag for tag in tags if not any(tag["begin"].startswith(trigger) for trigger in triggers)]:
            raise InvalidRequest(f"the tag {lost[0]['begin'][:40]!r} begins with no trigger")
        times = "+" if value.get("at_least_one") else "*"
        if value.get("stop_after_first"):
            return self._rule(f"({' | '.join(calls)}){'' if value.get('at_least_one') else ' | TEXT'}")
        return self._rule(f"({' | '.join(calls)}){times} TEXT")

    def _separated(self, value: Mapping[str, Any], depth: int) -> str:
        tags = [self._tag(_object(tag), depth) for tag in _list(value, "tags")]
        one, between = self._rule(" | ".join(tags)), self._text(value, "separator")
        if value.get("stop_after_first"):
            some = one
        else:
            some = self._rule(f"{one} ({between} {one})*")
        return some if value.get("at_least_one") else self._rule(f'{some} | ""')


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{str(value)[:40]!r} stands where an object must be")
    return value


def _string(value: Mapping[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise InvalidRequest(f"{key} must be a text")
    return text


def _list(value: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = value.get(key)
    if not isinstance(found, list) or not found:
        raise InvalidRequest(f"{key} must be a list that is not empty")
    return found
