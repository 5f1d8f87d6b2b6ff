"""What form an answer of the chat must have: what the request demands, forced calls, schemas of strict tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmjax.constraints.calls import (
    Tool,
    bare_call,
    begun_calls,
    forced_calls,
    harmony_call,
    is_bare,
    strict_calls,
    writes_json,
)
from llmjax.errors import InvalidRequest
from llmjax.parsing.choice import HARMONY, Parsers
from llmjax.parsing.families import JSON_LIST, TOOLS
from llmjax.sampling.structured import FreeText, StructuredOutputsParams
from llmjax.serve.answers import AnswerFormat
from llmjax.serve.custom_tools import ARGUMENT, NO_TOOLS, CustomTools
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.protocol.structured import structured_outputs
from llmjax.serve.protocol.tools import forced_tools

FINAL = "<|channel|>final<|message|>"  # where gpt-oss' answer begins
CONTENT_FORM = "response_format"  # the field that is about an answer's content: calls, which have none, do not heed it


def parsers_for(parsers: Parsers, *, forced: bool) -> Parsers:
    """The parsers of an answer; forced calls are written in JSON by a family that has another way, too."""
    if not forced or parsers.tools == HARMONY or (parsers.tools is not None and writes_json(TOOLS[parsers.tools])):
        return parsers
    return replace(parsers, tools=JSON_LIST)


def answer_form(
    body: ChatRequest,
    form: AnswerFormat,
    parsers: Parsers,
    *,
    tools: Sequence[Mapping[str, Any]],
    custom: CustomTools = NO_TOOLS,
) -> StructuredOutputsParams | None:
    """The form of an answer; None: any.

    Args:
        form: how the answer will be read.
        parsers: what `parsers_for` returns.
        tools: tools that the model may call.
        custom: those of them that are custom ones.

    Raises:
        ApiError: two forms are demanded.
        InvalidRequest: one is not a form.
    """
    demanded = structured_outputs(body)
    forced = forced_tools(body.tool_choice, tools)
    offered = _Offered(tools, custom)
    if forced is not None:
        if demanded is not None and demanded.field != CONTENT_FORM:
            raise ApiError(
                f"`{demanded.field}` cannot be combined with a call that `tool_choice` forces",
                param=demanded.field,
                code="invalid_value",
            )
        return _forced(form, parsers, offered, forced, several=body.tool_choice == "required" and form.parallel)
    if demanded is not None:
        demanded = replace(demanded, after=_reasoning(form, parsers, calls=False))
        if not tools or demanded.field != CONTENT_FORM or demanded.structural_tag is not None:
            return demanded
        return replace(demanded, instead=_calls(form, parsers, offered))
    if any(tool["function"].get("strict") is True for tool in tools) or any(custom.values()):
        return _strict(form, parsers, offered)
    return None


def held_to_tools(form: StructuredOutputsParams | None) -> bool:
    """Whether calls can only be written as the tools say."""
    return form is not None and "tools" in (form.field, form.instead and form.instead.field)


@dataclass(frozen=True)
class _Offered:
    """The tools of a request, and those of them that are custom ones."""

    tools: Sequence[Mapping[str, Any]]
    custom: CustomTools

    def read(
        self, chosen: Sequence[Mapping[str, Any]], *, enforced: Callable[[Mapping[str, Any]], bool] = lambda tool: True
    ) -> list[Tool]:
        """Some of them as calls have them.

        Args:
            chosen: which ones.
            enforced: whether a call is held to a tool's schema.

        Raises:
            InvalidRequest: one has a form that no call can be held to; names it.
        """
        places = {tool["function"]["name"]: f"tools.{i}" for i, tool in enumerate(self.tools)}
        return [self._read(tool, places[tool["function"]["name"]], enforced=enforced(tool)) for tool in chosen]

    def _read(self, tool: Mapping[str, Any], path: str, *, enforced: bool) -> Tool:
        wanted = self.custom.get(tool["function"]["name"])
        if wanted is None:
            return Tool.of(tool, path=path, enforced=enforced)
        try:
            if wanted.lark is None:
                return Tool.of(tool, path=path, enforced=enforced)
            return Tool.of_text(tool["function"]["name"], ARGUMENT, wanted.lark)
        except InvalidRequest as error:
            raise InvalidRequest(f"`{wanted.path}`: {error}", field=wanted.path) from error


def _calls(form: AnswerFormat, parsers: Parsers, offered: _Offered) -> StructuredOutputsParams:
    """Calls that the model may write in place of an answer that has a form."""
    assert parsers.tools is not None
    family = TOOLS[parsers.tools]
    if is_bare(family):
        calls = bare_call(offered.read(offered.tools), key=_key(parsers))
        held = not any(offered.custom.values())
    elif parsers.tools == HARMONY or writes_json(family):
        return _forced(form, parsers, offered, offered.tools, several=form.parallel)
    else:
        callable_tools = offered.read(offered.tools, enforced=lambda tool: False)
        calls, held = begun_calls(callable_tools, family=family), False
    tags = _tags(calls, form, parsers, lenient=_lenient(offered.tools))
    return tags if held else replace(tags, field=CONTENT_FORM)


def _forced(
    form: AnswerFormat,
    parsers: Parsers,
    offered: _Offered,
    tools: Sequence[Mapping[str, Any]],
    *,
    several: bool,
) -> StructuredOutputsParams:
    callable_tools = offered.read(tools)
    if parsers.tools == HARMONY:
        calls = harmony_call(callable_tools)
    else:
        assert parsers.tools is not None
        calls = forced_calls(callable_tools, several=several, family=TOOLS[parsers.tools], key=_key(parsers))
    return _tags(calls, form, parsers, lenient=_lenient(tools))


def _lenient(tools: Sequence[Mapping[str, Any]]) -> bool:
    return not all(tool["function"].get("strict") is True for tool in tools)


def _strict(form: AnswerFormat, parsers: Parsers, offered: _Offered) -> StructuredOutputsParams | None:
    if parsers.tools in (None, HARMONY):
        return None
    callable_tools = offered.read(offered.tools, enforced=lambda tool: tool["function"].get("strict") is True)
    calls = strict_calls(callable_tools, family=TOOLS[parsers.tools], key=_key(parsers))
    return None if calls is None else _tags(calls, form, parsers, lenient=False)


def _tags(calls: Any, form: AnswerFormat, parsers: Parsers, *, lenient: bool) -> StructuredOutputsParams:
    return StructuredOutputsParams(
        structural_tag=json.dumps({"format": calls}),
        lenient=lenient,
        after=_reasoning(form, parsers, calls=True),
        field="tools",
    )


def _key(parsers: Parsers) -> str:
    return "parameters" if parsers.tools == "llama3_json" else "arguments"


def _reasoning(form: AnswerFormat, parsers: Parsers, *, calls: bool) -> FreeText | None:
    """What the model thinks before, which has no form."""
    if (marks := parsers.reasoning_marks) is None:
        return None
    opening, closing = marks
    if parsers.reasoning == HARMONY:
        if calls:  # they have a channel of their own
            return FreeText(opening=opening, closing=closing.removesuffix(FINAL))
        return FreeText(opening=opening, closing=closing, otherwise=FINAL)
    return FreeText(opening="" if form.begins_with_reasoning else opening, closing=closing)
