"""Tool calls as structural tags, either in the format of a model family or as a list in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmjax.constraints.closing import closed
from llmjax.constraints.quoted import in_json
from llmjax.constraints.schemas import enforceable
from llmjax.errors import InvalidRequest
from llmjax.parsing.grammar import Grammar, Role, State

Format = dict[str, Any]  # see ``tags``

_ANY: Format = {"type": "object"}
LINE_END: Format = {"type": "regex", "pattern": r"\n?"}
# Roles of states in which JSON cannot be written.
_OTHER_FORMS = frozenset({Role.PYTHON, Role.BARE, Role.KEY, Role.VALUE, Role.ELEMENTS, Role.HEADER})
_HARMONY_CALL = ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>")


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that may be called.

    Args:
        arguments: format of the arguments, which are written as JSON.
    """

    name: str
    arguments: Format

    @classmethod
    def of(cls, tool: Mapping[str, Any], *, path: str, enforced: bool = True) -> Tool:
        """Reads a tool in OpenAI's form; if its schema is not enforced, arguments may be any object.

        Arguments that the schema does not name are not allowed: functions do not know them, and models invent them. If
        the schema is not strict, parts that cannot be enforced are left out.

        Args:
            path: path of the tool in the request.

        Raises:
            InvalidRequest: the schema is strict and cannot be enforced; the message names tool, place and keyword.
        """
        function = tool["function"]
        return cls(name=function["name"], arguments=_json(_arguments(function, path) if enforced else _ANY))

    @classmethod
    def of_text(cls, name: str, argument: str, grammar: str) -> Tool:
        """A tool whose only argument is a text that matches a Lark grammar.

        Raises:
            InvalidRequest: the grammar cannot be enforced inside JSON.
        """
        text: Format = {"type": "grammar", "grammar": in_json(grammar)}
        opening, closing = _const(f'{{{json.dumps(argument)}: "'), _const('"}')
        return cls(name=name, arguments=_joined([opening, text, closing]))


def _arguments(function: Mapping[str, Any], path: str) -> Any:
    """The schema of a function's arguments."""
    strict = function.get("strict") is True
    schema = closed({"type": "object", **(function.get("parameters") or {"properties": {}})})
    try:
        found = enforceable(schema, lenient=not strict, repair=not strict)
        if "object" not in found.get("type", "object"):
            raise InvalidRequest("type: arguments are an object")
        return {**found, "type": "object"}
    except InvalidRequest as error:
        if not strict:
            return _ANY
        place = f"{path}.function.parameters"
        raise InvalidRequest(f"`{place}` of the tool {function['name'][:80]!r}: {error}", field=place) from error


def forced_calls(tools: Sequence[Tool], *, several: bool, family: Grammar, key: str) -> Format:
    """One call of one of the tools, or several calls, and nothing else.

    Args:
        family: format of the model's calls. If that is not JSON, a list in JSON is used, which the family ``json_list``
            reads.
        key: name of the arguments if they are in JSON beside the tool's name.
    """
    if not writes_json(family):
        one: Format = {"type": "or", "elements": [_record(tool.name, tool, "parameters") for tool in tools]}
        return _joined([_const("["), _repeated(one, ", ") if several else one, _const("]")])
    one = {"type": "or", "elements": [_joined(call) for tool in tools for call in _ways(family, tool, key)]}
    return _repeated(one, "") if several and _repeats(family) else one


def strict_calls(tools: Sequence[Tool], *, family: Grammar, key: str) -> Format | None:
    """Free text in which every call must be one of the tools; None: the family has no marker that leads to calls."""
    if not writes_json(family):
        return None
    calls = [call for tool in tools for call in _ways(family, tool, key)]
    first = calls[0][0]
    if first["type"] != "const_string" or any(call[0] != first for call in calls):
        return None
    rest: Format = {"type": "or", "elements": [_joined(call[1:]) for call in calls]}
    tag = {"begin": first["value"], "content": rest, "end": ""}
    return {"type": "triggered_tags", "triggers": [first["value"]], "tags": [tag]}


def is_bare(family: Grammar) -> bool:
    """Whether a call is a JSON object without a marker, so that other answers in JSON begin in the same way."""
    return family.known_tools and any(marker.startswith("{") for marker in family.states[family.initial].kept)


def bare_call(tools: Sequence[Tool], *, key: str) -> Format:
    """A call of one of the tools as a schema, for families with bare calls: token by token, only a schema can tell a
    call from other JSON.

    Args:
        key: see `forced_calls`.
    """
    records = []
    for i, tool in enumerate(tools):
        arguments = tool.arguments.get("json_schema", {"type": "object"})
        properties = {"name": {"const": tool.name}, key: _moved(arguments, f"#/anyOf/{i}/properties/{key}")}
        records.append(
            {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        )
    return _json({"anyOf": records})


def _moved(schema: Any, place: str) -> Any:
    """A schema to be placed inside another one, with adjusted references to itself."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    own = schema.get("$ref")
    moved = {name: _moved(part, place) for name, part in schema.items()}
    return {**moved, "$ref": place + own[1:]} if isinstance(own, str) and own.startswith("#") else moved


def begun_calls(tools: Sequence[Tool], *, family: Grammar) -> Format:
    """The beginning of a call in a family that does not write JSON; the model decides how it continues."""
    state = family.states[family.initial if family.known_tools else "content"]
    # A single bracket, although it belongs to the calls, could begin any text.
    begins = [f"{marker}{tool.name}" if marker in state.kept else marker for marker in state.markers for tool in tools]
    rest: Format = {"type": "any_tokens"}
    return {"type": "or", "elements": [_joined([_const(begin), rest]) for begin in dict.fromkeys(begins)]}


def _repeats(family: Grammar) -> bool:
    """Whether calls may follow each other, each with its marker: not if that could continue the JSON before it."""
    markers = family.states["content"].edges
    return bool(markers) and not family.known_tools and not any(marker.startswith("[") for marker in markers)


def writes_json(family: Grammar) -> bool:
    """Whether the family writes a call's arguments as JSON, after a marker or as the whole answer."""
    if not (family.known_tools or family.states["content"].markers):
        return False
    return not any(state.role in _OTHER_FORMS for state in _on_the_way(family))


def harmony_call(tools: Sequence[Tool]) -> Format:
    """A call in the format of gpt-oss."""
    before, behind, end = _HARMONY_CALL
    calls = [
        {"type": "tag", "begin": f"{before}{tool.name}{behind}", "content": tool.arguments, "end": end}
        for tool in tools
    ]
    return {"type": "or", "elements": calls}


def _on_the_way(family: Grammar) -> Iterator[State]:
    """The states that a call passes through, and their alternatives."""
    return (state for state in family.states.values() if state.role not in (Role.CONTENT, Role.REASONING))


def _repeated(one: Format, separator: str) -> Format:
    tag = {"begin": "", "content": one, "end": ""}
    return {"type": "tags_with_separator", "separator": separator, "at_least_one": True, "tags": [tag]}


def _joined(parts: Sequence[Format]) -> Format:
    return {"type": "sequence", "elements": list(parts)}


def _record(name: str, tool: Tool, key: str) -> Format:
    """A call in JSON. Its arguments are a separate schema, so that references in it keep their targets."""
    begin = f'{{"name": {json.dumps(name)}, "{key}": '
    return _joined([_const(begin), tool.arguments, _const("}")])


def _json(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _ways(family: Grammar, tool: Tool, key: str) -> list[list[Format]]:
    """The formats of a call in the family: in some versions the name is in the JSON, in others before it."""
    ways = [_call(family, tool, key, by_name=by_name) for by_name in (False, True)]
    return ways[:1] if ways[0] == ways[1] else ways


def _call(family: Grammar, tool: Tool, key: str, *, by_name: bool) -> list[Format]:
    """A call from its marker to the content that may follow.

    Args:
        by_name: whether a call that may begin with JSON or a name begins with the name.
    """
    name = family.initial if family.known_tools else "content"
    parts: list[Format] = []
    written: list[str] = []  # markers before the call
    called = False
    for _ in family.states:  # each state is passed at most once
        state = family.states[name]
        match state.role:
            case Role.CONTENT if called:
                break
            case Role.CALLS:
                if family.keyed:
                    record = _joined([_const(f"{{{json.dumps(tool.name)}: "), tool.arguments, _const("}")])
                else:
                    record = _record(tool.name, tool, key)
                close = [_const("]")] if written and written[-1].endswith("[") else []
                parts += [LINE_END, record, *close, LINE_END]
                name, called = state.then, True
                if close:
                    break
                continue
            case Role.ARGUMENTS:
                parts += [LINE_END, tool.arguments, LINE_END]
                name, called = state.then, True
                continue
            case Role.NAME:
                parts.append(_name(family, tool))
            case Role.PARAMETERS:
                parts.append(_const("function"))
        if called:
            marker = _way_out(family, state, written)
        else:
            named = by_name and family.states[state.then].role is Role.NAME
            marker = None if named else _way_in(family, state)
        if marker is None and called:
            break
        if marker is None:
            name = state.then
            continue
        if marker in state.edges:
            parts.append(_const(marker))
            written.append(marker)
        name = state.target(marker)
    return parts


def _name(family: Grammar, tool: Tool) -> Format:
    if not family.own_ids:
        return _const(tool.name)
    return {"type": "regex", "pattern": rf"functions\.{re.escape(tool.name)}:[0-9]"}


def _way_in(family: Grammar, state: State) -> str | None:
    """The marker that leads to a call; calls without one begin immediately."""
    markers = (*state.kept, *state.edges) if family.known_tools else state.markers
    return next(
        (marker for marker in markers if family.states[state.target(marker)] not in (state, _content(family))), None
    )


def _way_out(family: Grammar, state: State, written: Sequence[str]) -> str | None:
    """The marker that leads to content after a call."""
    after = (Role.CONTENT, Role.BETWEEN)
    markers = (m for m in state.markers if m not in written and family.states[state.target(m)].role in after)
    return next(markers, None)


def _content(family: Grammar) -> State:
    return family.states["content"]
