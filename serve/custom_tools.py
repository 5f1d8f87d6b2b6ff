"""OpenAI's custom tools, whose input is text: to a model they are functions of one argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmjax.sampling.structured import MAX_GRAMMAR_CHARS
from llmjax.serve.errors import ApiError

ARGUMENT = "input"
WRITTEN = {"function": "arguments", "custom": "input"}  # what a model writes of a chat's call
# What arguments begin with up to the text, as far as they have come; spaces may stand between.
_OPENING = ("{", f'"{ARGUMENT}"', ":", '"')
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


@dataclass(frozen=True, kw_only=True)
class InputForm:
    """What the input of a custom tool must be.

    Args:
        path: where the request says so.
        lark: a grammar; None: an expression, which the function's schema has.
    """

    path: str
    lark: str | None


CustomTools = Mapping[str, InputForm | None]  # the forms of inputs, by the names of functions; None: any text
NO_TOOLS: CustomTools = MappingProxyType({})


def from_chat(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], CustomTools]:
    """The tools of a chat, custom ones among them, as functions.

    Raises:
        ApiError: a custom tool is not one.
    """
    forms: dict[str, InputForm | None] = {}
    functions = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "custom":
            functions.append(dict(tool))
            continue
        path = f"tools.{i}.custom"
        flat = _flat(tool.get("custom"), path)
        functions.append(as_function(flat, path))
        forms[flat["name"]] = input_form(flat, path)
    return functions, forms


def chosen(tools: Sequence[Mapping[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], Any]:
    """The functions of a chat that may be called, and the choice among them: custom tools are functions, and of a list
    of those that are allowed there is left whether one must be called."""
    match choice:
        case {"type": "custom"}:
            choice = {"type": "function", "function": {"name": _name(choice)}}
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}}:
            names = [_name(tool) for tool in allowed]
            return [dict(tool) for tool in tools if _name(tool) in names], mode
    return [dict(tool) for tool in tools], choice


def _name(tool: Any) -> Any:
    """What stands in a chat's tool, or in a choice, as its name."""
    kind = tool.get("type", "function") if isinstance(tool, dict) else None
    inner = tool.get(kind) if isinstance(kind, str) else None
    return inner.get("name") if isinstance(inner, dict) else None


def _flat(custom: Any, path: str) -> dict[str, Any]:
    """What stands under ``custom``, in the form that the Responses API has."""
    if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
        raise ApiError(f"`{path}` must be an object with a name", param=path, code="invalid_type")
    match custom.get("format"):
        case {"type": "grammar", "grammar": {**grammar}}:
            return {**custom, "format": {"type": "grammar", **grammar}}
        case _:
            return custom


def as_function(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A custom tool as the chat has tools. A regular expression is one of the argument; a grammar is told.

    Raises:
        ApiError: it is not one.
    """
    demanded = tool.get("format")
    form: Mapping[str, Any] = {"type": "text"} if demanded is None else demanded
    argument: dict[str, Any] = {"type": "string"}
    function: dict[str, Any] = {"name": tool.get("name")}
    described = [tool["description"]] if isinstance(tool.get("description"), str) else []
    match form:
        case {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "regex", "definition": str(pattern)}:
            argument["pattern"] = f"^(?:{pattern})$"
            function["strict"] = True
        case {"type": "grammar", "syntax": "lark", "definition": str(grammar)}:
            if len(grammar) > MAX_GRAMMAR_CHARS:
                raise ApiError(
                    f"`{path}.format`: the grammar has more than {MAX_GRAMMAR_CHARS} characters",
                    param=f"{path}.format",
                    code="invalid_value",
                )
            described.append(f"The {ARGUMENT} is a text of this grammar (Lark):\n{grammar}")
        case _:
            raise ApiError(
                f"`{path}.format` must be of type text, or a grammar with a syntax (regex or lark) and a definition",
                param=f"{path}.format",
                code="invalid_value",
            )
    function["parameters"] = {
        "type": "object",
        "properties": {ARGUMENT: argument},
        "required": [ARGUMENT],
        "additionalProperties": False,
    }
    if described:
        function["description"] = "\n\n".join(described)
    return {"type": "function", "function": function}


def input_form(tool: Mapping[str, Any], path: str) -> InputForm | None:
    """What the input of a tool must be that `as_function` has found good."""
    form = tool.get("format") or {}
    if form.get("type") != "grammar":
        return None
    return InputForm(path=f"{path}.format", lark=form["definition"] if form["syntax"] == "lark" else None)


def whole_call(kind: str, *, id: str | None, name: str, written: str) -> dict[str, Any]:
    """A call as a chat's messages have it.

    Args:
        kind: function or custom.
        written: what the model has written of it.
    """
    return {"id": id, "type": kind, kind: {"name": name, WRITTEN[kind]: written}}


def arguments_of(text: str) -> str:
    """A call's input as the arguments of the function."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """What `InputReader` reads out of all arguments of a call."""
    reader = InputReader()
    return reader.read(arguments) + reader.finish()


class InputReader:
    """Reads the input out of a call's arguments, as they come. Arguments that are not such an object are the input."""

    def __init__(self) -> None:
        self._waiting = ""  # what may not be told apart yet
        self._opened = 0  # parts of the opening that have been read
        self._seen = ""  # of the opening
        self._raw = False
        self._ended = False

    def read(self, text: str) -> str:
        """The input's part that is certain now; each character is looked at a bounded number of times."""
        if self._raw:
            return text
        if self._ended:
            return ""
        self._waiting += text
        if self._opened < len(_OPENING) and not self._open():
            if not self._raw:
                return ""
            whole, self._waiting = self._seen + self._waiting, ""
            return whole
        return self._text()

    def finish(self) -> str:
        """What is left when the arguments have ended: all of them, if they have not become such an object."""
        if self._opened < len(_OPENING) and not self._raw:
            return self._seen + self._waiting
        return ""

    def _open(self) -> bool:
        """Goes through the opening; False: it has not all come, or it is another one (``_raw``)."""
        while self._opened < len(_OPENING):
            wanted = _OPENING[self._opened]
            rest = self._waiting.lstrip(" \t\r\n")
            if not rest.startswith(wanted):
                self._raw = not wanted.startswith(rest)
                return False
            end = len(self._waiting) - len(rest) + len(wanted)
            self._seen += self._waiting[:end]
            self._waiting = self._waiting[end:]
            self._opened += 1
        return True

    def _text(self) -> str:
        """What has come of the JSON string, unescaped, up to its end or to an escape that is not whole."""
        pieces: list[str] = []
        text, at = self._waiting, 0
        while at < len(text):
            plain = _PLAIN.match(text, at)
            assert plain is not None
            pieces.append(plain[0])
            at = plain.end()
            if at == len(text):
                break
            if text[at] == '"':
                self._ended = True
                at = len(text)
                break
            piece, end = _escape(text, at)
            if end is None:
                break
            pieces.append(piece)
            at = end
        self._waiting = text[at:]
        return "".join(pieces)


def _escape(text: str, at: int) -> tuple[str, int | None]:
    """The character that an escape at a place stands for, and where it ends; None: it has not all come."""
    if at + 1 >= len(text):
        return "", None
    kind = text[at + 1]
    if kind != "u":
        return _ESCAPES.get(kind, kind), at + 2
    if at + 6 > len(text):
        return "", None
    if (unit := _unit(text, at)) is None:
        return "u", at + 2  # it is none
    if not 0xD800 <= unit < 0xDC00:
        return (chr(unit) if not 0xDC00 <= unit < 0xE000 else "\ufffd"), at + 6
    following = text[at + 6 : at + 12]
    if len(following) < 6 and "\\u".startswith(following[:2]):
        return "", None
    low = _unit(text, at + 6) if following.startswith("\\u") else None
    if low is None or not 0xDC00 <= low < 0xE000:
        return "\ufffd", at + 6
    return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)), at + 12


def _unit(text: str, at: int) -> int | None:
    """The UTF-16 unit of ``\\uXXXX``."""
    digits = text[at + 2 : at + 6]
    return int(digits, 16) if re.fullmatch(r"[0-9A-Fa-f]{4}", digits) else None
