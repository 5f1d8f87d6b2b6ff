"""Tools, the choice among them, and calls in messages: checked, and as chat templates know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from llmjax.serve.custom_tools import arguments_of
from llmjax.serve.errors import ApiError, cut

MAX_TOOLS = 512
MAX_TOOL_BYTES = 2**20  # of all tools of a request, as JSON
MAX_TOOL_NAME = 256
MAX_SCHEMA_DEPTH = 64  # objects and arrays in each other
MAX_CALLS = 1024  # of one message
MCP_ELSEWHERE = "tool servers are called for /v1/responses alone, those that the operator names (--mcp-config)"


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Functions in OpenAI's form, as they came; empty where there are none.

    Raises:
        ApiError: one is not a function, or they are too much.
    """
    if not tools:
        return []
    if len(orjson.dumps(tools)) > MAX_TOOL_BYTES:
        raise ApiError(f"`tools` take more than {MAX_TOOL_BYTES} bytes", param="tools", code="invalid_value")
    names = [_checked(tool, f"tools.{i}") for i, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        name = next(name for i, name in enumerate(names) if name in names[:i])
        raise ApiError(f"`tools` holds two functions called {cut(name)!r}", param="tools", code="invalid_value")
    return [dict(tool) for tool in tools]


def _checked(tool: Mapping[str, Any], path: str) -> str:
    kind, function = tool.get("type", "function"), tool.get("function")
    if kind == "mcp":
        raise ApiError(f"`{path}.type`: {MCP_ELSEWHERE}", param=f"{path}.type", code="unsupported_parameter")
    if kind != "function":
        raise ApiError(
            f"`{path}.type`: {str(kind)[:40]!r} tools are not supported, only functions and custom tools",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    if not isinstance(function, dict):
        raise ApiError(
            f"`{path}.function` must be an object with a name", param=f"{path}.function", code="invalid_type"
        )
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME or not name.isprintable() or " " in name:
        raise ApiError(
            f"`{path}.function.name` must be a name of at most {MAX_TOOL_NAME} characters, without spaces",
            param=f"{path}.function.name",
            code="invalid_value",
        )
    for field, kinds in (("description", (str,)), ("parameters", (dict,)), ("strict", (bool,))):
        value = function.get(field)
        if value is not None and not isinstance(value, kinds):
            wanted = {str: "a string", dict: "an object", bool: "a boolean"}[kinds[0]]
            raise ApiError(
                f"`{path}.function.{field}` must be {wanted}", param=f"{path}.function.{field}", code="invalid_type"
            )
    if _depth(function.get("parameters")) > MAX_SCHEMA_DEPTH:
        raise ApiError(
            f"`{path}.function.parameters` is nested deeper than {MAX_SCHEMA_DEPTH}",
            param=f"{path}.function.parameters",
            code="invalid_value",
        )
    return name


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [item for inner in level for item in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def calls_allowed(choice: Any, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the model may call ``tools``.

    Args:
        choice: the request's ``tool_choice``.

    Raises:
        ApiError: the choice is not one.
    """
    if choice is None or choice in ("auto", "none"):
        return bool(tools) and choice != "none"
    named = isinstance(choice, dict) and choice.get("type") == "function"
    if choice != "required" and not named:
        raise ApiError(
            '`tool_choice` must be "auto", "none", "required" or name a function',
            param="tool_choice",
            code="invalid_value",
        )
    if not tools:
        raise ApiError("`tool_choice` needs `tools`", param="tool_choice", code="invalid_value")
    if named:
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in [tool["function"]["name"] for tool in tools]:
            raise ApiError(
                f"`tool_choice` names {cut(str(name))!r}, which is not among `tools`",
                param="tool_choice",
                code="invalid_value",
            )
    return True


def forced_tools(choice: Any, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The tools of which one must be called; None: none must.

    Args:
        choice: as `calls_allowed` has found it good.
    """
    if choice == "required":
        return list(tools)
    if isinstance(choice, dict):
        return [tool for tool in tools if tool["function"]["name"] == choice["function"]["name"]]
    return None


def template_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """The ``tool_calls`` of a message.

    Raises:
        ApiError: they are not calls of functions.
    """
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise ApiError(f"`{path}` must be a list of at most {MAX_CALLS} calls", param=path, code="invalid_type")
    return [_template_call(call, f"{path}.{i}") for i, call in enumerate(calls)]


def _template_call(call: Any, path: str) -> dict[str, Any]:
    if isinstance(call, dict) and call.get("type") == "custom":
        match call.get("custom"):
            case {"name": str(name), "input": str(text)}:
                call = {**call, "function": {"name": name, "arguments": arguments_of(text)}}
            case _:
                message = f"`{path}.custom` must be an object with a name and an input"
                raise ApiError(message, param=f"{path}.custom", code="invalid_type")
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"`{path}` must be an object with a function that has a name", param=path, code="invalid_type")
    if not isinstance(call.get("id"), str | None):
        raise ApiError(f"`{path}.id` must be a string", param=f"{path}.id", code="invalid_type")
    call_fields = {"name": function["name"], "arguments": function.get("arguments")}
    turn = {"id": call.get("id"), "type": "function", "function": call_fields}
    return turn if turn["id"] is not None else {"type": "function", "function": call_fields}
