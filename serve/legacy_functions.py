"""OpenAI's older ``functions`` and ``function_call``, as tools on their way in and back on their way out."""

from __future__ import annotations

from typing import Any

from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.chat import ChatRequest

# What of them is called otherwise in errors of tools.
NAMES_OF_FUNCTIONS = {r"tools\.(\d+)\.function": r"functions.\1", "tools": "functions", "tool_choice": "function_call"}


def read_functions(body: ChatRequest) -> None:
    """Turns the functions of a request into tools, of which one is called at most.

    Raises:
        ApiError: it has both, or a choice without functions.
    """
    choice = body.function_call
    if body.functions is None:
        if choice not in (None, "none", "auto"):
            raise ApiError("`function_call` needs `functions`", param="function_call", code="invalid_value")
        return
    if body.tools:
        raise ApiError("`functions` and `tools` exclude each other", param="functions", code="invalid_value")
    body.tools = [{"type": "function", "function": function} for function in body.functions]
    body.tool_choice = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    body.parallel_tool_calls = False


def with_function_call(fields: dict[str, Any]) -> dict[str, Any]:
    """A message or a delta whose call of a tool is a call of a function."""
    if "tool_calls" not in fields:
        return fields
    (call,) = fields["tool_calls"]
    rest = {name: value for name, value in fields.items() if name != "tool_calls"}
    return {**rest, "function_call": call["function"]}
