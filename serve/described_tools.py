"""Tools for models whose chat templates do not know them: described in words, with calls and results as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

CALL, RESULT = "tool_call", "tool_response"

_INSTRUCTIONS = """You can call functions to help with the user's request. The functions, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and arguments between these tags, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"a parameter": "its value"}}}}
</tool_call>
Results come back between <tool_response> tags. If no function is needed, answer as usual."""


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, of which the first, of the role "system", says what tools there are and how to call them."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=described)
    first, *rest = messages
    if first["role"] == "system":
        return [{**first, "content": f"{_text(first['content'])}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(messages: Sequence[dict[str, Any]], *, tool_role: bool) -> list[dict[str, Any]]:
    """The messages with calls in the text of those who made them.

    Args:
        tool_role: the template knows messages of the role "tool"; otherwise results become words of the user.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            texts = [_text(message["content"])] if message["content"] else []
            texts += [_tagged(CALL, _call(call["function"])) for call in calls]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            turns.append({**rest, "content": "\n".join(texts)})
        elif message["role"] == "tool" and not tool_role:
            text = _tagged(RESULT, _text(message["content"]))
            if turns and turns[-1].get("results"):
                turns[-1]["content"] += "\n" + text
            else:
                turns.append({"role": "user", "content": text, "results": True})
        else:
            turns.append(message)
    return [{key: value for key, value in turn.items() if key != "results"} for turn in turns]


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) and arguments else json.dumps(arguments or {}, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {text}}}'


def _tagged(tag: str, text: str) -> str:
    return f"<{tag}>\n{text}\n</{tag}>"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
