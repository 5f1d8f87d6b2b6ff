"""/v1/responses: answers, whole, as a stream or in the background, and what is kept of them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.serve.body import parse, read_json
from llmjax.serve.context import (
    Server,
    Shared,
    cache_salt_of,
    client_of,
    ignored_fields,
    owner_of,
    record_of,
    server_of,
    shared_of,
)
from llmjax.serve.custom_tools import InputForm, as_function, input_form
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.generation import guarded
from llmjax.serve.mcp.loop import ToolLoop
from llmjax.serve.mcp.offered import Offered, all_offered, offered_by
from llmjax.serve.mcp.servers import ToolServers
from llmjax.serve.other_names import other_names
from llmjax.serve.prompts import CHARS_PER_PART, chat_prompt, off_loop, read_tools, template_source
from llmjax.serve.protocol.chat import MAX_MESSAGES, ChatRequest
from llmjax.serve.protocol.common import GenerationRequest
from llmjax.serve.protocol.responses import (
    INCLUDABLE,
    SEALED,
    InputRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from llmjax.serve.protocol.tools import calls_allowed
from llmjax.serve.responses.approvals import approved_calls
from llmjax.serve.responses.background import Background
from llmjax.serve.responses.conversation import Item, flat_name, listed, messages_of, new_id
from llmjax.serve.responses.store import StoredResponse, find_items
from llmjax.serve.responses.writer import ResponseWriter
from llmjax.serve.responses.writing import Writing
from llmjax.serve.sse import EventStream, named_event
from llmjax.serve.turn import Turn, prepare, reads_effort, thinking_variables

NAMES = {
    r"tools\.(\d+)\.function": r"tools.\1",
    r"response_format": "text.format",
    r"max_completion_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"messages": "input",
}
MOST_LISTED = 100
# Tools of OpenAI that clients such as Codex offer with every request: a model may answer without.
UNUSED_TOOLS = frozenset(
    {
        "image_generation",
        "local_shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)


async def create_response(request: Request) -> Response | ASGIApp:
    """A response to a conversation, whole, as a stream, or in the background."""
    server = server_of(request)
    config = server.config
    body = parse(await read_json(request), ResponsesRequest, ignored=ignored_fields(request))
    writing = await _begin(server, body, request)
    if body.background:
        stored = _run(server, writing)
        if body.stream:
            assert stored.run is not None
            return _stream(server, stored.run.follow(0))
        return Response(stored.body(), media_type="application/json")
    if body.stream:
        return EventStream(
            writing.events(),
            encode=writing.sent,
            keep_alive=config.sse_keep_alive_interval,
            timeout=config.request_timeout,
            end=b"",
            failed=lambda error: b"".join(map(named_event, writing.writer.fail(error))),
        )
    whole = await guarded(request.receive, writing.whole(), timeout=config.request_timeout)
    return Response(whole, media_type="application/json")


async def get_response(request: Request) -> Response | ASGIApp:
    """A response that is kept; of one in the background also its events, from any of them on."""
    server = shared_of(request)
    stored = server.responses.get(owner_of(request), request.path_params["response_id"])
    query = request.query_params
    if query.get("stream", "false").lower() != "true":
        if "starting_after" in query:
            raise ApiError("starting_after needs stream=true", param="starting_after", code="invalid_value")
        return Response(stored.body(), media_type="application/json")
    if stored.run is None:
        raise ApiError(
            "only responses in the background can be streamed again", param="stream", code="unsupported_parameter"
        )
    after = query.get("starting_after", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise ApiError("starting_after must be the number of an event", param="starting_after", code="invalid_value")
    return _stream(server, stored.run.follow(int(after) + 1))


async def delete_response(request: Request) -> Response:
    """Forget a response; one that is still written ends."""
    id = request.path_params["response_id"]
    shared_of(request).responses.delete(owner_of(request), id)
    return Response(orjson.dumps({"id": id, "object": "response", "deleted": True}), media_type="application/json")


async def cancel_response(request: Request) -> Response:
    """End a response in the background."""
    stored = shared_of(request).responses.get(owner_of(request), request.path_params["response_id"])
    if stored.run is None:
        raise ApiError("only responses in the background can be canceled", code="invalid_value")
    stored.run.cancel()
    return Response(stored.body(), media_type="application/json")


async def list_input_items(request: Request) -> Response:
    """What a response was asked, those before it included."""
    stored = shared_of(request).responses.get(owner_of(request), request.path_params["response_id"])
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MOST_LISTED:
        raise ApiError(f"limit must be between 1 and {MOST_LISTED}", param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        raise ApiError("order must be asc or desc", param="order", code="invalid_value")
    items: list[Item] = orjson.loads(stored.input)
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise ApiError(f"there is no item {cut(after)!r}", param="after", code="invalid_value")
        items = items[place + 1 :]
    shown = items[: int(limit)]
    page = {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(items) > len(shown),
    }
    return Response(orjson.dumps(page), media_type="application/json")


async def count_input_tokens(request: Request) -> Response:
    """How many tokens the input of a response has."""
    server = server_of(request)
    body = parse(await read_json(request), InputTokensRequest, ignored=ignored_fields(request))
    server.check_model(body.model)
    with other_names(NAMES):
        chat, _, _ = await _chat(server, body, request)
        tools = await read_tools(chat)
        tools = tools if calls_allowed(chat.tool_choice, tools) else []
        variables = thinking_variables(server, chat, template_source(server, chat, with_tools=bool(tools)))
        owner, salt = owner_of(request), cache_salt_of(request, None)
        prompt = await chat_prompt(server, chat, tools=tools, owner=owner, cache_salt=salt, variables=variables)
    count = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
    return Response(orjson.dumps(count), media_type="application/json")


def _stream(server: Shared, events: AsyncGenerator[bytes, None]) -> EventStream:
    return EventStream(events, keep_alive=server.config.sse_keep_alive_interval, timeout=None, end=b"")


async def _chat(server: Server, body: InputRequest, request: Request) -> tuple[ChatRequest, list[Item], list[Item]]:
    """The chat request that a request comes to, and the items that it is made of, as they are listed: those of earlier
    responses, and its own."""
    input_items: list[Item] = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    before: list[Item] = []
    if body.previous_response_id is not None:
        previous = server.responses.get(owner_of(request), body.previous_response_id, field="previous_response_id")
        _check_previous(server, previous, items=len(input_items))
        before = previous.context()
    ignored = record_of(request).ignored
    input_items = await _dereferenced(server, input_items, owner_of(request))

    def read() -> tuple[list[Any], list[Item]]:
        sees = server.pictures is not None
        return messages_of(body.instructions, before, input_items, ignored, sees=sees), listed(input_items)

    messages, own = await off_loop(read, size=CHARS_PER_PART * (len(before) + len(input_items)))
    given = (body.model_fields_set & GenerationRequest.model_fields.keys()) - {"response_format"}
    tools, choice = _tools(body, server.tool_servers)
    chat = ChatRequest.model_construct(
        **{name: getattr(body, name) for name in given},
        messages=messages,
        tools=tools,
        tool_choice=choice,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=_response_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    # Agents ask all models alike. That there is to be none of it is more than a hint.
    if chat.reasoning_effort not in (None, "none") and not reads_effort(
        template_source(server, chat, with_tools=bool(tools))
    ):
        chat.reasoning_effort = None
        ignored.append("reasoning.effort")
    return chat, before, own


async def _dereferenced(server: Server, items: list[Item], owner: str) -> list[Item]:
    """Items with those that they refer to in their places.

    Raises:
        ApiError: one is not kept, is referred to twice, or together they are larger than a request may be.
    """
    places: dict[int, str] = {}
    for i, item in enumerate(items):
        if item.get("type") == "item_reference":
            if not isinstance(id := item.get("id"), str):
                raise ApiError(f"`input.{i}.id` must be a string", param=f"input.{i}.id", code="invalid_type")
            places[i] = id
    if not places:
        return items
    if len(ids := set(places.values())) < len(places):
        raise ApiError("an item is referred to twice", param="input", code="invalid_value")
    stored_items = await asyncio.to_thread(find_items, server.responses.all(owner), ids)
    for i, id in places.items():
        if id not in stored_items:
            message = f"there is no item {cut(id)!r}, or its response is not kept or no longer kept"
            raise ApiError(message, status=404, param=f"input.{i}.id", code="not_found")
    if sum(len(orjson.dumps(item)) for item in stored_items.values()) > server.limits.bytes:
        message = f"the items that are referred to take more than {server.limits.bytes} bytes"
        raise ApiError(message, param="input", code="invalid_value")
    return [stored_items[places[i]] if i in places else item for i, item in enumerate(items)]


def _check_previous(server: Server, previous: StoredResponse, *, items: int) -> None:
    """Whether a request with this many items can follow a response: together they are bounded like one body."""
    if previous.running:
        message = f"the response {cut(previous.id)!r} is still written"
    elif len(previous.input) > server.limits.bytes:
        message = f"the responses before this one take more than {server.limits.bytes} bytes"
    elif previous.num_items + items > MAX_MESSAGES:
        message = f"there are more than {MAX_MESSAGES} items with those before this response"
    else:
        return
    raise ApiError(message, param="previous_response_id", code="invalid_value")


def _tools(body: InputRequest, servers: ToolServers) -> tuple[list[dict[str, Any]], Any]:
    """Tools and the choice among them as the chat has them.

    Raises:
        ApiError: one is not a function, or the choice is not one.
    """
    given = [(f"tools.{i}", tool) for i, tool in enumerate(body.tools or []) if tool.get("type") not in UNUSED_TOOLS]
    tools = [flat for path, tool in given for flat in _flat(tool, path, servers)]
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return tools, choice
    match choice:
        case {"type": "function" | "custom"}:
            return tools, {"type": "function", "function": {"name": choice.get("name")}}
        case {"type": "mcp", "server_label": str(label), "name": str(name)}:
            return tools, {"type": "function", "function": {"name": flat_name(label, name)}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            names = [_allowed_name(tool) for tool in allowed if isinstance(tool, dict)]
            return [tool for tool in tools if tool["function"].get("name") in names], mode
    raise ApiError(
        '`tool_choice` must be "auto", "none", "required", a function, a custom tool or allowed_tools',
        param="tool_choice",
        code="invalid_value",
    )


def _allowed_name(tool: Mapping[str, Any]) -> Any:
    """What the model calls a tool of allowed_tools."""
    label, name = tool.get("server_label"), tool.get("name")
    whole = tool.get("type") == "mcp" and isinstance(label, str) and isinstance(name, str)
    return flat_name(str(label), str(name)) if whole else name


def _flat(tool: Mapping[str, Any], path: str, servers: ToolServers) -> list[dict[str, Any]]:
    """A tool, or those of a namespace or a tool server."""
    if tool.get("type") == "mcp":
        return [one.function() for one in offered_by(tool, path, servers)]
    if tool.get("type") != "namespace":
        return [_tool(tool, path)]
    inner = _inner(tool)
    if not isinstance(tool.get("name"), str) or inner is None:
        raise ApiError(f"`{path}` must have a name and a list of tools with names", param=path, code="invalid_type")
    tools = [_tool(one, f"{path}.tools.{i}") for i, one in enumerate(inner)]
    for one in tools:
        one["function"]["name"] = flat_name(tool["name"], one["function"]["name"])
    return tools


def _inner(tool: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a namespace; None: it is not one."""
    tools = tool.get("tools") if tool.get("type") == "namespace" else None
    named = isinstance(tools, list) and all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in tools)
    return tools if named else None


def _custom(body: ResponsesRequest) -> dict[str, InputForm | None]:
    """Custom tools by what the model calls them."""
    forms: dict[str, InputForm | None] = {}
    for i, tool in enumerate(body.tools or []):
        inner = _inner(tool)
        for j, one in enumerate([tool] if inner is None else inner):
            if one.get("type") == "custom" and isinstance(name := one.get("name"), str):
                path = f"tools.{i}" if inner is None else f"tools.{i}.tools.{j}"
                forms[name if inner is None else flat_name(tool["name"], name)] = input_form(one, path)
    return forms


def _unheeded(body: InputRequest) -> list[str]:
    """Tools that no call can come of."""
    return [f"tools.{i}" for i, tool in enumerate(body.tools or []) if tool.get("type") in UNUSED_TOOLS]


def _namespaces(body: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """The functions in namespaces of a request whose tools `_flat` has found good."""
    return {
        flat_name(tool["name"], one["name"]): (tool["name"], one["name"])
        for tool in body.tools or []
        for one in _inner(tool) or []
    }


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") == "custom":
        return as_function(tool, path)
    if (kind := tool.get("type")) != "function":
        raise ApiError(
            f"`{path}.type`: {cut(str(kind))!r} tools are not supported: the server runs no tools; give it a "
            "function, or a custom tool, that your program runs",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _response_format(body: InputRequest) -> dict[str, Any] | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type"}}


async def _begin(server: Server, body: ResponsesRequest, request: Request) -> Writing:
    for i, name in enumerate(body.include or []):
        if name not in INCLUDABLE:
            raise ApiError(f"`include.{i}`: {cut(name)!r} is not known", param=f"include.{i}", code="invalid_value")
    owner = owner_of(request)
    if body.background:
        if not body.stored:
            raise ApiError("background needs store=true", param="background", code="invalid_value")
        server.responses.check_room(owner)
    id = new_id("resp")
    with other_names(NAMES):
        chat, before, own = await _chat(server, body, request)
        chat.stream_options = body.stream_options if body.stream else None
        chat.store = None  # it is stored here
        chat.max_completion_tokens = body.max_output_tokens
        chat.thinking_token_budget = body.thinking_token_budget
        if body.wants_logprobs:
            chat.logprobs, chat.top_logprobs = True, body.top_logprobs
        # What tokens belong to the text shows as they come.
        chat.stream = bool(body.stream or body.background or chat.logprobs)
        record = record_of(request)
        salt = cache_salt_of(request, body.cache_salt)
        custom = _custom(body)
        client = client_of(request)
        turn = await prepare(server, chat, record=record, cache_salt=salt, client=client, id=id, custom=custom)

    async def follow_up(chat: ChatRequest, after: Turn | None) -> Turn:
        told = [*record.ignored]
        with other_names(NAMES):
            found = await prepare(
                server, chat, record=record, cache_salt=salt, client=client, id=id, cut=True, custom=custom, after=after
            )
        record.ignored = told  # what is ignored is so in every round
        return found

    offered = all_offered(body.tools, server.tool_servers)
    items = before + own
    approved = approved_calls(before, own)
    for one in approved:
        _check_offered(one, offered)
    loop = None
    if offered:
        most = server.config.mcp_max_calls
        loop = ToolLoop(
            offered=offered,
            known=_listed_labels(items),
            chat=chat,
            prepare=follow_up,
            most=min(body.max_tool_calls or most, most),
            seconds=server.config.mcp_loop_timeout,
            approved=approved,
        )
    unheeded = [*body.without_effect(), *_unheeded(body)]
    record.ignored += [name for name in unheeded if name not in record.ignored]
    writer = ResponseWriter(
        _fields(server, body, turn),
        seal=body.includes(SEALED),
        namespaces=_namespaces(body),
        custom=custom,
        mcp={name: (one.label, one.tool.name) for name, one in offered.items()},
        asking=frozenset(name for name, one in offered.items() if one.needs_approval),
    )
    asked = await off_loop(lambda: orjson.dumps(items), size=CHARS_PER_PART * len(items)) if body.stored else b""
    return Writing(
        server=server,
        body=body,
        turn=turn,
        writer=writer,
        owner=owner,
        input=asked,
        num_items=len(items),
        loop=loop,
    )


def _check_offered(approved: Item, offered: Mapping[str, Offered]) -> None:
    """A call that is approved can be made by a request that offers its tool only."""
    if (name := flat_name(approved["server_label"], approved["name"])) not in offered:
        raise ApiError(
            f"`input` approves a call of {cut(name)!r}, which is not among the tools of `tools`",
            param="input",
            code="invalid_value",
        )


def _listed_labels(items: list[Item]) -> frozenset[str]:
    """Tool servers whose tools items list."""
    return frozenset(item["server_label"] for item in items if item["type"] == "mcp_list_tools")


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool


def _fields(server: Server, body: ResponsesRequest, turn: Turn) -> dict[str, Any]:
    """What a response says of its request."""
    (params,) = turn.job.params
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body.text is not None and body.text.format is not None:
        text["format"] = body.text.format
    if body.text is not None and body.text.verbosity is not None:
        text["verbosity"] = body.text.verbosity
    reasoning = body.reasoning
    return {
        "id": turn.job.id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "frequency_penalty": params.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": turn.job.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.stored,
        "temperature": params.temperature,
        "text": text,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_shown(tool) for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _run(server: Server, writing: Writing) -> StoredResponse:
    """Begins to write in the background."""
    stored = writing.stored(None)

    def ended() -> None:
        stored.answer = orjson.dumps(writing.writer.response)
        server.responses.trim(writing.owner)

    stored.run = Background(
        writing.writer, writing.events(), passing=server.passing(), timeout=server.config.request_timeout, ended=ended
    )
    server.responses.put(stored)
    return stored


RESPONSE_ROUTES = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{response_id}", get_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/cancel", cancel_response, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", list_input_items, methods=["GET"]),
]
