"""Calls on their way out: a name, then arguments, piece by piece; and the ways in which families write both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from llmjax.parsing.elements import json_of_elements
from llmjax.parsing.events import Arguments, CallBegun, Event
from llmjax.parsing.json_reading import json_string, json_value
from llmjax.parsing.python_literal import json_of_literal
from llmjax.parsing.scanner import scanner_of
from llmjax.parsing.schemas import ToolSchemas, json_of_text
from llmjax.parsing.source import Reading, Search, Source

NAME_KEYS = frozenset({"name", "tool_name", "function", "function_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args", "input"})
MAX_NAME = 256  # characters of a tool's name

_LIST = re.compile(r"[\s\[,;]*")
_COMMAS = re.compile(r"[\s,]*")
_WORD = re.compile(r"\w*")
_DOTTED = re.compile(r"[\w.\-]*")
_PYTHON_PLAIN = re.compile(r"[^'\"()\[\]{},]*")
_IN_QUOTES = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_BARE_WORD = re.compile(r'[^"{}\[\],:<]*')
_BEGINS_JSON = re.compile(r'\s*[\[{"\d.-]')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")


class Calls:
    """The calls of one output.

    Args:
        emit: gets the events.
        known: whether a name makes a call only if there is such a tool.
        begun: called when a call has been given out.
        ended: called when a call is whole.
    """

    def __init__(
        self,
        tools: ToolSchemas,
        emit: Callable[[Event], None],
        *,
        known: bool,
        begun: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._tools = tools
        self._emit = emit
        self._known = known
        self._begun = begun
        self._ended = ended
        self._name: str | None = None  # of the call that is open
        self._id: str | None = None
        self._given = False  # it has been given out
        self._empty = True  # it has no arguments so far
        self._parameters = 0  # written one by one

    @property
    def open(self) -> bool:
        return self._name is not None

    @property
    def pending(self) -> bool:
        """Whether the open call is one only if arguments or its end follow."""
        return self._name is not None and not self._given

    def accepts(self, name: str, *, known: bool = False) -> bool:
        known = known or self._known
        return bool(name) and len(name) <= MAX_NAME and (not known or name in self._tools.names)

    def begin(self, name: str, id: str | None = None) -> None:
        """Opens a call, which is given out with its arguments or its end: a name alone may be one that is talked of."""
        self.end()
        self._name, self._id, self._given, self._empty, self._parameters = name, id, False, True, 0

    def give(self) -> None:
        """Gives the open call out: it is one."""
        if self.pending:
            assert self._name is not None
            self._given = True
            self._begun()
            self._emit(CallBegun(self._name, self._id))

    def drop(self) -> None:
        """The call that is pending is none."""
        if self.pending:
            self._name = None

    def end(self) -> None:
        """Completes the open call, if there is one."""
        if self._name is None:
            return
        self.give()
        if self._parameters:
            self.argue("}")
        elif self._empty:
            self.argue("{}")
        self._name = None
        self._ended()

    def cut(self, *, whole: bool) -> None:
        """The text has ended: an open call stays as far as it has come.

        Args:
            whole: the model has ended it, so that a call without arguments has none.
        """
        self.give()
        if self._name is not None and self._empty and whole:
            self.argue("{}")
        self._name = None

    def argue(self, text: str) -> None:
        """Adds to the open call's arguments."""
        if text:
            self.give()
            self._empty = False
            self._emit(Arguments(text))

    def parameter(self, key: str) -> None:
        """Begins a parameter of the open call; its value, as JSON, is to follow."""
        self.argue(("{" if self._parameters == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._parameters += 1

    def types(self, key: str) -> frozenset[str] | None:
        return self._tools.types(self._name or "", key)

    def text_parameter(self, key: str, text: str) -> None:
        """A whole parameter that was written as text."""
        types = self.types(key)
        self.parameter(key)
        self.argue(json_of_text(text, types))

    def elements(self, text: str, *, before_tags: str, whole: bool) -> None:
        """The open call's arguments as elements; without an end if there may be more."""
        made = json_of_elements(text, before_tags=before_tags, schema=self._tools.schema(self._name or ""))
        self.argue(made if whole else made.removesuffix("}").removesuffix("{"))

    def cut_parameter(self, key: str, text: str) -> None:
        """The beginning of a parameter that was written as text, as far as it has come."""
        types = self.types(key)
        if text.strip() and (types is None or types != frozenset({"string"})):
            self.parameter(key)
            self.argue(text if _BEGINS_JSON.match(text) else '"' + escaped(text))

    def arguments(self, source: Source) -> Reading[None]:
        """The open call's arguments as one JSON value, or as a string that holds one.

        Where the call is pending, what cannot be arguments is left unread, and the call stays pending.
        """
        char = yield from source.spaces()
        if char == '"':
            text, _ = yield from json_string(source)
            self.give()
            self.argue(text)
        elif char == "n":
            yield from self._no_arguments(source)
        elif char in ("{", "[") or not self.pending:
            yield from json_value(source, self.argue)

    def _no_arguments(self, source: Source) -> Reading[None]:
        word: list[str] = []
        yield from json_value(source, word.append)
        if "".join(word) == "null":
            self.give()
        elif not self.pending:
            self.argue("".join(word))

    def objects(self, source: Source, *, keyed: bool) -> Reading[None]:
        """Calls as JSON objects, one after another or in a list. An object that is not a call stays marked.

        Args:
            keyed: each has the name as its only key.
        """
        while True:
            yield from source.run(_LIST)
            if (yield from source.peek()) != "{":
                return
            source.mark()
            yield from self._object(source, keyed=keyed)
            if source.marked:
                return

    def _object(self, source: Source, *, keyed: bool) -> Reading[None]:
        source.take(source.at + 1)
        named = argued = False
        early: list[str] = []  # arguments that came before the name
        inside = 0  # objects in which the call is wrapped
        while True:
            yield from source.run(_COMMAS)
            char = yield from source.peek()
            if char == "}":
                source.take(source.at + 1)
                if inside == 0:
                    self.end()
                    return
                inside -= 1
                continue
            if char != '"':
                return
            key, _ = yield from json_string(source)
            if (yield from source.spaces()) != ":":
                return
            source.take(source.at + 1)
            char = yield from source.spaces()
            if keyed and not named and self.accepts(key):
                named = argued = True
                self.begin(key)
                yield from self.arguments(source)
                if self.pending:
                    return
            elif not named and key in NAME_KEYS and char == '"':
                name, whole = yield from json_string(source)
                if not whole or not self.accepts(name):
                    return
                named = True
                self.begin(name)
                self.argue("".join(early))
            elif not named and key == "function" and char == "{":
                source.take(source.at + 1)
                inside += 1
            elif key in ARGUMENT_KEYS and not argued:
                argued = True
                if named:
                    yield from self.arguments(source)
                    if self.pending:
                        return
                elif char == '"':
                    early.append((yield from json_string(source))[0])
                elif char in ("{", "["):
                    yield from json_value(source, early.append)
                else:
                    yield from json_value(source, lambda _: None)
            else:
                yield from json_value(source, lambda _: None)

    def python(self, source: Source) -> Reading[None]:
        """Calls as Python writes them, with literals as arguments. What begins like one and is not stays marked."""
        while True:
            yield from source.run(_LIST)
            if _WORD.fullmatch((yield from source.peek()) or "]") is None:
                return
            source.mark()
            name: list[str] = []
            yield from source.run(_DOTTED, name)
            if (yield from source.peek()) != "(" or not self.accepts("".join(name)):
                return
            source.take(source.at + 1)
            self.begin("".join(name))
            yield from self._python_arguments(source)

    def _python_arguments(self, source: Source) -> Reading[None]:
        names = self._tools.parameters(self._name or "")
        while True:
            yield from source.run(_COMMAS)
            if (yield from source.peek()) in (")", ""):
                break
            value: list[str] = []
            yield from source.run(_WORD, value)
            key = "".join(value)
            if key and (yield from source.spaces()) == "=":
                source.take(source.at + 1)
                value.clear()
            else:
                place = self._parameters
                key = names[place] if place < len(names) else f"argument_{place}"
            yield from _python_value(source, value.append)
            if source.closed and source.at == len(source.text):
                return  # of a value that was cut nothing is known
            if not value:
                source.take(source.at + 1)  # a bracket that nothing has opened
                continue
            self.parameter(key)
            self.argue(json_of_literal("".join(value)))
        if (yield from source.peek()):
            source.take(source.at + 1)
            self.end()

    def bare(self, source: Source, quotes: str) -> Reading[None]:
        """The open call's arguments as an object whose keys have no quotes, and whose strings have ``quotes``."""
        inside: list[str] = []  # the brackets that are open
        key = False  # a key comes next
        while char := (yield from source.spaces()):
            if char in "{[":
                inside.append(char)
                key = char == "{"
                self.argue(source.take(source.at + 1))
            elif char in "}]":
                inside.pop()
                key = False
                self.argue(source.take(source.at + 1))
                if not inside:
                    return
            elif char in ",:":
                key = char == "," and inside[-1] == "{"
                self.argue(source.take(source.at + 1))
            elif char == '"':
                yield from json_value(source, self.argue)
            elif (yield from source.anchored([quotes])):
                source.take(source.at + len(quotes))
                yield from self._quoted(source, quotes)
            else:
                word: list[str] = []
                yield from source.run(_BARE_WORD, word)
                if not word:
                    word.append(source.take(source.at + 1))
                text = "".join(word).rstrip()
                plain = not key and (text in ("true", "false", "null") or _NUMBER.fullmatch(text))
                if not (source.closed and source.at == len(source.text)):
                    self.argue(text if plain else json.dumps(text, ensure_ascii=False))

    def _quoted(self, source: Source, quotes: str) -> Reading[None]:
        search = Search(source, scanner_of((quotes,)), within=True)
        self.argue('"')
        while True:
            self.argue(escaped(search.step()))
            if search.marker is not None:
                source.take(source.at + len(quotes))
                self.argue('"')
                return
            if source.closed:
                return
            yield


def escaped(text: str) -> str:
    """A piece of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _python_value(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    """A Python expression up to a comma or bracket that does not belong to it."""
    depth = 0
    while True:
        pieces: list[str] = []
        yield from source.run(_PYTHON_PLAIN, pieces)
        for piece in pieces:
            emit(piece)
        char = yield from source.peek()
        if char in ("'", '"'):
            yield from _python_string(source, emit)
            continue
        depth += (char in ("(", "[", "{")) - (char in (")", "]", "}"))
        if not char or depth < 0 or (depth == 0 and char == ","):
            return
        emit(source.take(source.at + 1))


def _python_string(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    quote = source.text[source.at]
    end = (yield from source.anchored([quote, 2 * quote, 3 * quote])) or quote
    if end == 2 * quote:
        emit(source.take(source.at + 2))
        return
    emit(source.take(source.at + len(end)))
    while True:
        pieces: list[str] = []
        yield from source.run(_IN_QUOTES[quote], pieces)
        for piece in pieces:
            emit(piece)
        char = yield from source.peek()
        if char == "\\":
            while source.at + 1 == len(source.text) and not source.closed:
                yield
            emit(source.take(source.at + 2))
        elif not char or (yield from source.anchored([end])):
            emit(source.take(source.at + len(end)) if char else "")
            return
        else:
            emit(source.take(source.at + 1))
