"""Items of the Responses API as the messages of a chat, and as the API lists them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from llmjax.serve.custom_tools import arguments_of
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.mcp.results import error_text
from llmjax.serve.protocol.chat import ChatMessage, unread_part
from llmjax.serve.responses.approvals import REQUEST, RESPONSE, checked_response, denial
from llmjax.serve.responses.rounds import round_of
from llmjax.serve.sealing import unsealed

NO_IMAGE = "an image stands in messages of the user, for models that see, such as Qwen/Qwen2.5-VL-3B-Instruct"
# Parts that the chat reads as they are, with what of them is kept.
SEEN = frozenset({"input_image", "input_video", "video_url"})
READ = frozenset({"input_file"})
KEPT_FIELDS = ("type", "image_url", "video_url", "detail", "uuid", "file_id", "file_data", "file_url", "filename")
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
SYSTEM = frozenset({"system", "developer"})
ROLES = frozenset({"user", "assistant", *SYSTEM})
# Of ids, by the type of what they are of.
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    REQUEST: "mcpr",
    RESPONSE: "mcprr",
}
# Calls of tools that OpenAI defines and clients run: what the function is called here, and what may hold its arguments.
RUN_BY_CLIENTS = {
    "local_shell_call": ("local_shell", ("action",)),
    "shell_call": ("shell", ("action",)),
    "apply_patch_call": ("apply_patch", ("operation",)),
    "computer_call": ("computer", ("action", "actions")),
}
SCREENSHOT = "computer_screenshot"
RESULTS = frozenset({"function_call_output", "custom_tool_call_output", *(f"{kind}_output" for kind in RUN_BY_CLIENTS)})
# Calls, which one answer may have several of.
CALLS = frozenset({"function_call", "custom_tool_call", "mcp_call", REQUEST, *RUN_BY_CLIENTS})
# Those of them that the server makes.
BY_SERVER = frozenset({"mcp_call", REQUEST})
# Items of which nothing can be read here: what OpenAI's server has done itself, and what only it can unseal.
OF_THE_SERVER = frozenset(
    {
        "code_interpreter_call",
        "compaction",
        "context_compaction",
        "file_search_call",
        "image_generation_call",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
NOT_RUN = "Error: the call was not run"
Item = dict[str, Any]


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def flat_name(namespace: str, name: str) -> str:
    """What a function in a namespace is called where there are no namespaces."""
    return f"{namespace}__{name}"


def told_of(item: Item) -> str:
    """What a model is told that a call of a tool server has brought.

    Args:
        item: the ``mcp_call``, whose output is a text if there is one.
    """
    if item.get("error") is not None:
        return error_text(item["error"])
    return NOT_RUN if item.get("output") is None else str(item["output"])


def messages_of(
    instructions: str | None,
    before: Sequence[Item],
    items: Sequence[Item],
    ignored: list[str],
    *,
    sees: bool = False,
) -> list[ChatMessage]:
    """The conversation that items are. Reasoning, words and calls that follow each other are one answer; what a system
    message says at the beginning is one message with the instructions. Calls whose ids say that they belong to
    different rounds are different answers, and so are calls of tool servers of which nothing is known.

    Args:
        before: items of earlier responses.
        items: items of the request's own input.
        ignored: takes the names of items of which nothing can be read.
        sees: whether the model sees images.

    Raises:
        ApiError: an item is not one, or has something that the model cannot read.
    """
    reader = _Conversation(ignored, sees=sees)
    if instructions:
        reader.say("system", instructions)
    for item in before:
        reader.read(item, "previous_response_id")
    for i, item in enumerate(items):
        reader.read(item, f"input.{i}")
    return reader.done()


class _Conversation:
    def __init__(self, ignored: list[str], *, sees: bool) -> None:
        self._sees = sees
        self._turns: list[dict[str, Any]] = []
        self._thought: list[str] = []  # before the answer that it belongs to
        self._results: list[dict[str, Any]] = []  # of calls of the answer, which come after all of them
        self._round: str | None = None  # the round of the answer's calls
        self._asked: dict[str, dict[str, Any]] = {}  # results of calls that need approval, by the request's id
        self._answered: set[str] = set()  # ids of requests that have been approved or denied
        self._ignored = ignored
        self._kinds: Mapping[str, Callable[[Item, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "custom_tool_call": self._custom_call,
            "mcp_call": self._mcp_call,
            "mcp_list_tools": self._mcp_list,
            REQUEST: self._approval_request,
            RESPONSE: self._approval_response,
            **dict.fromkeys(RUN_BY_CLIENTS, self._defined_call),
            **dict.fromkeys(RESULTS, self._result),
        }

    def read(self, item: Item, path: str) -> None:
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind in OF_THE_SERVER:
            self._ignored.append(path)
            return
        read = self._kinds.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise ApiError(
                f"`{path}.type`: {cut(str(kind))!r} items are not supported",
                param=f"{path}.type",
                code="unsupported_parameter",
            )
        if kind not in CALLS:
            self._end_calls()
        read(item, path)

    def done(self) -> list[ChatMessage]:
        self._end_calls()
        if self._thought:
            self._answer()
        return [ChatMessage.model_construct(**turn) for turn in self._turns]

    def say(self, role: str, content: Any) -> None:
        if role in SYSTEM and len(self._turns) == 1 and (first := self._turns[0])["role"] in SYSTEM:
            first["content"] = f"{_plain(first['content'])}\n\n{_plain(content)}"
        elif role == "assistant":
            turn = self._answer()
            if turn["content"] is not None or "tool_calls" in turn:
                turn = self._answer(new=True)
            turn["content"] = content
        else:
            self._turns.append({"role": role, "content": content})

    def _message(self, item: Item, path: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ApiError(
                f"`{path}.role` must be user, assistant, system or developer",
                param=f"{path}.role",
                code="invalid_value",
            )
        whole = READ | (SEEN if self._sees else frozenset()) if role == "user" else frozenset()
        self.say(role, _content(item.get("content"), f"{path}.content", whole=whole))

    def _reasoning(self, item: Item, path: str) -> None:
        texts = [
            _plain(_content(item[field], f"{path}.{field}")) for field in ("content", "summary") if item.get(field)
        ]
        content = item.get("encrypted_content")
        if texts:
            self._thought.append(texts[0])
        elif isinstance(content, str):
            if (text := unsealed(content)) is None:
                self._ignored.append(f"{path}.encrypted_content")
            else:
                self._thought.append(text)

    def _custom_call(self, item: Item, path: str) -> None:
        _check_text(item, "input", path)
        self._call({**item, "arguments": arguments_of(item["input"])}, path)

    def _defined_call(self, item: Item, path: str) -> None:
        name, fields = RUN_BY_CLIENTS[item["type"]]
        arguments = next((item[field] for field in fields if item.get(field) is not None), None)
        self._call({**item, "name": name, "arguments": arguments}, path)

    def _mcp_call(self, item: Item, path: str) -> None:
        if item.get("error") is None and item.get("output") is not None:
            _check_text(item, "output", path)
        said = told_of(item)
        asked = item.get("approval_request_id")
        if isinstance(asked, str) and asked in self._asked:  # the request stands where the model has called
            for field in ("server_label", "name", "arguments"):
                _check_text(item, field, path)
            self._asked[asked]["content"] = said
        else:
            self._made_here(item, path, said)

    def _approval_request(self, item: Item, path: str) -> None:
        result = self._made_here(item, path, NOT_RUN)
        self._asked[item["id"]] = result

    def _approval_response(self, item: Item, path: str) -> None:
        id = checked_response(item, path, self._asked)
        if id in self._answered:
            raise ApiError(f"`{path}`: {cut(id)!r} has an answer already", param=path, code="invalid_value")
        self._answered.add(id)
        if not item["approve"]:
            self._asked[id]["content"] = denial(item)

    def _made_here(self, item: Item, path: str, said: str) -> dict[str, Any]:
        """A call that the server makes; returns the message of its result."""
        for field in ("id", "server_label", "name", "arguments"):
            _check_text(item, field, path)
        self._call({**item, "call_id": item["id"], "name": flat_name(item["server_label"], item["name"])}, path)
        result = {"role": "tool", "tool_call_id": item["id"], "content": said}
        self._results.append(result)
        return result

    def _mcp_list(self, item: Item, path: str) -> None:
        """Nothing is said by it: the model knows the tools that the request offers."""
        _check_text(item, "server_label", path)

    def _end_calls(self) -> None:
        self._turns += self._results
        self._results, self._round = [], None

    def _call(self, item: Item, path: str) -> None:
        for field in ("call_id", "name"):
            _check_text(item, field, path)
        if "arguments" not in item:
            _check_text(item, "arguments", path)
        namespace, name = item.get("namespace"), item["name"]
        if namespace is not None:
            _check_text(item, "namespace", path)
            name = flat_name(namespace, name)
        function = {"name": name, "arguments": item["arguments"]}
        # An id of another server is a round of its own; clients may drop those of their functions.
        round = round_of(item.get("id")) or (item["id"] if item["type"] in BY_SERVER else None)
        if round is not None:
            if self._round not in (None, round):
                self._end_calls()
            self._round = round
        calls = self._answer().setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})

    def _result(self, item: Item, path: str) -> None:
        item = {**item, "call_id": _call_of(item)}
        _check_text(item, "call_id", path)
        whole = READ | SEEN if self._sees else READ
        content = _output(item.get("output"), f"{path}.output", self._ignored, whole=whole)
        self._turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})

    def _answer(self, *, new: bool = False) -> dict[str, Any]:
        """The answer that is being put together."""
        if new or self._thought or not self._turns or self._turns[-1]["role"] != "assistant":
            turn: dict[str, Any] = {"role": "assistant", "content": None}
            if self._thought:
                turn["reasoning_content"] = "\n".join(self._thought)
                self._thought = []
            self._turns.append(turn)
        return self._turns[-1]


def _call_of(item: Item) -> Any:
    """The call that a result belongs to: OpenAI's older local shell names it by the result's own id."""
    return item.get("id" if item["type"] == "local_shell_call_output" and "call_id" not in item else "call_id")


def _check_text(item: Item, field: str, path: str) -> None:
    if not isinstance(item.get(field), str):
        raise ApiError(f"`{path}.{field}` must be a string", param=f"{path}.{field}", code="invalid_type")


def _content(content: Any, path: str, *, whole: frozenset[str] = frozenset()) -> str | list[dict[str, Any]]:
    """Text, or parts of it as the chat has them, and parts of the types in ``whole`` as they are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"`{path}` must be a string or a list of parts", param=path, code="invalid_type")
    return [part if _is_of(part, whole) else _part(part, f"{path}.{i}") for i, part in enumerate(content)]


def _is_of(part: Any, kinds: frozenset[str]) -> bool:
    return isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in kinds


def _output(
    output: Any, path: str, unread: list[str], *, whole: frozenset[str] = frozenset()
) -> str | list[dict[str, Any]]:
    """What a tool has found: text, with a note where it is something else, a screenshot, or JSON."""
    if _is_of(output, frozenset({SCREENSHOT})):
        output = [{**output, "type": "input_image"}]
    if not isinstance(output, list):
        return _content(output, path)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(output):
        kind = part.get("type") if isinstance(part, dict) else None
        if _is_of(part, whole):
            parts.append(part)
        elif isinstance(part, dict) and kind is None:
            parts.append({"type": "text", "text": orjson.dumps(part).decode()})
        elif isinstance(kind, str) and kind not in TEXT_PARTS and kind != "refusal":
            unread.append(f"{path}.{i}")
            parts.append({"type": "text", "text": unread_part(kind)})
        else:
            parts.append(_part(part, f"{path}.{i}"))
    return parts


def _part(part: Any, path: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if _is_of(part, SEEN):
        raise ApiError(f"`{path}.type`: {kind!r}: {NO_IMAGE}", param=f"{path}.type", code="unsupported_parameter")
    field = "refusal" if kind == "refusal" else "text"
    if not isinstance(kind, str) or (kind not in TEXT_PARTS and kind != "refusal"):
        raise ApiError(
            f"`{path}.type`: {cut(str(kind))!r} parts are not supported, only text",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    _check_text(part, field, path)
    return {"type": "text", "text": part[field]}


def _plain(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def listed(items: Sequence[Item]) -> list[Item]:
    """Items that `messages_of` has read, as the API lists them: each with an id and content in parts, and with nothing
    that is not read."""
    return [_listed(item) for item in items]


def _listed(item: Item) -> Item:
    kind = item.get("type", "message")
    common = {"id": item.get("id"), "type": kind, "status": "completed"}
    if not isinstance(common["id"], str):
        common["id"] = new_id(PREFIXES.get(str(kind), str(kind)))
    if kind in OF_THE_SERVER:
        return common
    match kind:
        case "message":
            role = item["role"]
            part = "output_text" if role == "assistant" else "input_text"
            return {**common, "role": role, "content": [_listed_part(one, part) for one in _parts(item["content"])]}
        case "function_call":
            fields = _kept(item, "call_id", "name", "arguments", "namespace")
            arguments = item["arguments"]
            written = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
            return {**common, **fields, "arguments": written}
        case "custom_tool_call":
            return {**common, **_kept(item, "call_id", "name", "input", "namespace")}
        case "mcp_call":
            fields = {name: item.get(name) for name in ("approval_request_id", "error", "output")}
            status = "completed" if fields["error"] is None else "failed"
            return {**common, "status": status, **_kept(item, "server_label", "name", "arguments"), **fields}
        case str() if kind == REQUEST:
            return {"id": common["id"], "type": kind, **_kept(item, "server_label", "name", "arguments")}
        case str() if kind == RESPONSE:
            return {"id": common["id"], "type": kind, **_kept(item, "approval_request_id", "approve", "reason")}
        case "mcp_list_tools":
            tools = item.get("tools")
            listed_tools = tools if isinstance(tools, list) else []
            return {**common, "server_label": item["server_label"], "tools": listed_tools, "error": item.get("error")}
        case str() if kind in RUN_BY_CLIENTS:
            return {**common, **_kept(item, "call_id", *RUN_BY_CLIENTS[kind][1])}
        case str() if kind in RESULTS:
            output = item["output"]
            if _is_of(output, frozenset({SCREENSHOT})):
                return {**common, "call_id": _call_of(item), "output": _kept(output, *KEPT_FIELDS)}
            parts = _parts(_output(output, "", [], whole=READ | SEEN))
            listed_parts = [_listed_part(part, "input_text") for part in parts]
            return {**common, "call_id": _call_of(item), "output": output if isinstance(output, str) else listed_parts}
        case _:
            content = [_listed_part(one, "reasoning_text") for one in _parts(item.get("content") or [])]
            summary = [_listed_part(one, "summary_text") for one in _parts(item.get("summary") or [])]
            seal = item.get("encrypted_content")
            readable = isinstance(seal, str) and unsealed(seal) is not None
            return {
                **common,
                "summary": summary,
                "content": content,
                **({"encrypted_content": seal} if readable else {}),
            }


def _kept(item: Item, *names: str) -> Item:
    return {name: item[name] for name in names if item.get(name) is not None}


def _parts(content: str | list[Item]) -> list[Item]:
    return [{"text": content}] if isinstance(content, str) else content


def _listed_part(part: Item, kind: str) -> Item:
    if part.get("type") == "refusal":
        refusal = part["refusal"]
        return {"type": "refusal", "refusal": refusal} if kind == "output_text" else {"type": kind, "text": refusal}
    if _is_of(part, READ | SEEN):
        return _kept(part, *KEPT_FIELDS)
    listed: Item = {"type": kind, "text": part["text"]}
    return {**listed, "annotations": []} if kind == "output_text" else listed
