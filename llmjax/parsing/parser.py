"""The automaton that runs a grammar over streamed text."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Callable, Generator
from dataclasses import replace

from llmjax.parsing.calls import MAX_NAME, Calls, escaped
from llmjax.parsing.events import Content, Event, Reasoning, joined
from llmjax.parsing.grammar import Grammar, Role, State
from llmjax.parsing.scanner import scanner_of
from llmjax.parsing.schemas import ToolSchemas
from llmjax.parsing.source import SPACES, Reading, Search, Source
from llmjax.parsing.thoughts import Thoughts

_PUNCTUATION = "]}),;`"
_NAME = re.compile(r"\s*[^\s<>\"{}\[\]()]*\s*")
_KEY = re.compile(r"[^\n<>]*\n?")
_WITHIN = frozenset({Role.VALUE, Role.ELEMENTS, Role.PARAMETERS})  # a call, whose markers may be cut
_STRING = frozenset({"string"})


class OutputParser:
    """Reads one output. Its events, joined, are the same however the text is cut, and take linear time.

    Args:
        grammar: grammar of the model's family, in the state that the prompt leaves it in.
        tools: those of the request.
    """

    def __init__(self, grammar: Grammar, tools: ToolSchemas | None = None) -> None:
        self._grammar = grammar
        self._tools = tools or ToolSchemas()
        self._source = Source()
        self._events: list[Event] = []
        self._calls = Calls(
            self._tools,
            self._events.append,
            known=grammar.known_tools,
            begun=self._call_begun,
            ended=self._call_ended,
        )
        self._any_content = self._any_reasoning = self._any_call = False
        self._spaces: list[str] = []  # at the end of the content, which may turn out to be followed by a call
        self._name = ""  # that a call to come has
        self._id: str | None = None
        self._key = ""
        self.content: list[int] = []  # characters before each beginning and each end of content, in turn
        self.first_call_end: int | None = None  # characters up to the end of the first whole call
        self._turns: list[int] = []  # characters before each beginning and each end of reasoning, in turn
        self._thoughts: Thoughts | None = None  # while inside of reasoning
        self._whole = False  # the model has ended the text
        self._readers: dict[Role, Callable[[State], Reading[str | None]]] = {
            Role.CONTENT: self._content,
            Role.REASONING: self._reasoning,
            Role.START: self._choice,
            Role.BETWEEN: self._choice,
            Role.NAME: self._call_name,
            Role.ID: self._call_id,
            Role.ARGUMENTS: self._by_itself,
            Role.CALLS: self._by_itself,
            Role.PYTHON: self._by_itself,
            Role.BARE: self._by_itself,
            Role.PARAMETERS: self._dropped,
            Role.KEY: self._parameter_key,
            Role.VALUE: self._parameter_value,
            Role.ELEMENTS: self._elements,
            Role.HEADER: self._header,
        }
        self._run = self._states()
        next(self._run)

    def feed(self, text: str) -> list[Event]:
        """The events that more text makes certain."""
        self._source.push(text)
        next(self._run)
        return self._taken()

    def finish(self, *, whole: bool = False) -> list[Event]:
        """The rest: there is no more text.

        Args:
            whole: the model has ended it; otherwise it was cut, and a call may lack the arguments that were to come.
        """
        self._source.closed, self._whole = True, whole
        next(self._run)
        return self._taken()

    @property
    def position(self) -> int:
        """Characters of the text that have been read for certain."""
        return self._source.position if self._thoughts is None else self._turns[-1] + self._thoughts.shown

    @property
    def certain(self) -> int:
        """Characters of which it is known whether they are content, as far as it can be known before the end."""
        return self._source.certain

    @property
    def fed(self) -> int:
        """Characters that have come."""
        return self._source.position + len(self._source.text) - self._source.at

    @property
    def reasons(self) -> bool:
        """Whether the text has stopped inside of reasoning."""
        return len(self._turns) % 2 == 1

    def reasons_at(self, position: int) -> bool:
        """Whether the character at ``position`` of the text is part of reasoning, if it has been read."""
        return bisect_right(self._turns, position) % 2 == 1

    def _taken(self) -> list[Event]:
        events = joined(self._events)
        self._events.clear()
        return events

    def _states(self) -> Generator[None, None, None]:
        yield  # for the first text
        name: str | None = self._grammar.initial
        while name is not None:
            state = self._grammar.states[name]
            self._enter(state)
            name = yield from self._readers[state.role](state)
        if state.role is Role.HEADER:
            self._source.unmark()
        if self._name:
            self._calls.begin(self._name, self._id)
        if self._whole and state.role is Role.PARAMETERS:
            self._calls.end()  # only its end is missing
        self._calls.cut(whole=self._whole)
        self._give_back()
        if not self._any_call:
            self._emit_content("")
        while True:
            yield

    def _enter(self, state: State) -> None:
        if self._name and state.role is not Role.ID:
            name, self._name = self._name, ""
            self._calls.begin(name, self._id)
        if state.role in (Role.CONTENT, Role.REASONING, Role.BETWEEN):
            self._calls.end()
        if state.role in (Role.CONTENT, Role.REASONING) or state.silent:
            self._source.unmark()  # what led here is not text

    def _call_begun(self) -> None:
        self._source.unmark()
        self._spaces.clear()
        self._any_call = True

    def _call_ended(self) -> None:
        if self.first_call_end is None:
            self.first_call_end = self._source.position

    def _give_back(self) -> None:
        """What was read since the mark was not what it seemed."""
        self._name = ""
        self._calls.drop()
        self._read_content(self._source.unmark())

    def _read_content(self, text: str) -> None:
        """The text that has been read last is content."""
        end = self._source.position
        start = end - len(text)
        if self.content and self.content[-1] == start:
            self.content[-1] = end
        elif text:
            self.content += [start, end]
        self._say(text)

    def _search(self, state: State, sink: Callable[[str], None]) -> Reading[str | None]:
        """Gives ``sink`` the text before a marker, which is left unread; None: the text has ended."""
        search = Search(self._source, scanner_of(state.markers), within=state.role in _WITHIN)
        while True:
            if text := search.step():
                sink(text)
            if search.marker is not None or self._source.closed:
                return search.marker
            yield

    def _follow(self, state: State, marker: str) -> str:
        if marker in state.edges:
            self._source.take(self._source.at + len(marker))
        return state.target(marker)

    # The roles of states. Each returns the name of the next state, or None where the text has ended before.

    def _content(self, state: State) -> Reading[str | None]:
        marker = yield from self._search(state, self._read_content)
        if marker is None:
            return None
        self._source.mark()
        return self._follow(state, marker)

    def _say(self, text: str) -> None:
        if not self._any_content and (self._any_reasoning or self._any_call):
            text = text.lstrip()
        if shown := text.rstrip():
            self._emit_content(shown)
        if len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def _emit_content(self, text: str) -> None:
        text = "".join(self._spaces) + text
        self._spaces.clear()
        if text:
            self._any_content = True
            self._events.append(Content(text))

    def _reasoning(self, state: State) -> Reading[str | None]:
        spaces: list[str] = ["\n"] if self._any_reasoning else []
        begun = False

        def think(text: str) -> None:
            nonlocal begun
            text = text if begun else text.lstrip()
            if shown := text.rstrip():
                self._events.append(Reasoning("".join(spaces) + shown))
                spaces.clear()
                begun = self._any_reasoning = True
            if begun and len(shown) < len(text):
                spaces.append(text[len(shown) :])

        if not self._any_content:
            self._spaces.clear()
        self._turns.append(self._source.position)
        grammar = self._grammar.thoughts
        thoughts = Thoughts(None if grammar is None else OutputParser(grammar, self._tools))
        self._thoughts = thoughts
        marker = yield from self._search(state, lambda text: think(thoughts.add(text)))
        self._thoughts = None
        if marker is None:
            self._not_closed(thoughts, think)
            return None
        think(thoughts.closed())
        self._turns.append(self._source.position)
        self._any_reasoning = True  # also where it is empty: what follows is trimmed
        return self._follow(state, marker)

    def _not_closed(self, thoughts: Thoughts, think: Callable[[str], None]) -> None:
        """The text has ended inside of reasoning: calls in it, if there are any, have ended it."""
        text, events = thoughts.ended(whole=self._whole)
        think(text)
        if not events:
            return
        self._turns.append(self._turns[-1] + thoughts.shown)
        self._any_reasoning = True
        for event in events:
            if isinstance(event, Content):
                self._say(event.text)
            else:
                self._any_call = True
                self._events.append(event)

    def _choice(self, state: State) -> Reading[str | None]:
        source = self._source
        skipped: list[str] = []
        if state.role is Role.START:
            source.mark()
            yield from source.run(SPACES, skipped)
        else:
            yield from self._skip_punctuation(state, skipped)
        marker = yield from source.anchored(state.markers)
        states = self._grammar.states
        if marker is not None:
            role = states[state.target(marker)].role
            if role not in (Role.CONTENT, Role.BETWEEN):
                source.mark()
            following = self._follow(state, marker)
            if role is Role.CONTENT and state.role is Role.BETWEEN and source.marked:
                self._give_back()  # nothing stands between the markers of calls
            return following
        if states[state.then].role is Role.CONTENT:
            self._say("" if source.marked or state.silent else "".join(filter(str.isspace, "".join(skipped))))
            self._give_back()
        return state.then

    def _skip_punctuation(self, state: State, skipped: list[str]) -> Reading[None]:
        """Reads white space and brackets up to a marker, which may begin with such."""
        source, first = self._source, {marker[0] for marker in state.markers}
        while True:
            yield from source.run(_punctuation(state.markers), skipped)
            char = yield from source.peek()
            if not char or char not in _PUNCTUATION or char not in first:
                return
            if (yield from source.anchored(state.markers)) is not None:
                return
            skipped.append(source.take(source.at + 1))

    def _word(self, state: State, may_begin: Callable[[str], bool]) -> Reading[tuple[str, str | None]]:
        """A short text up to a marker, which is left unread; None: the text has ended, or is not such a word."""
        source, written = self._source, ""
        first = {marker[0] for marker in state.markers}
        while char := (yield from source.peek()):
            if char in first and (marker := (yield from source.anchored(state.markers))) is not None:
                return written, marker
            if len(written) == MAX_NAME or not may_begin(written + char):
                break
            written += source.take(source.at + 1)
        return written, None

    def _call_name(self, state: State) -> Reading[str | None]:
        names = self._tools.names if state.known or self._grammar.known_tools else None

        def may_begin(text: str) -> bool:
            possible = names is None or any(name.startswith(text.strip()) for name in names)
            return possible and _NAME.fullmatch(text) is not None

        written, marker = yield from self._word(state, may_begin)
        if marker is None and self._source.is_cut():
            return None
        match = None if marker is None else self._grammar.name.fullmatch(written.strip())
        if marker is None or match is None or not self._calls.accepts(match["name"], known=state.known):
            self._give_back()
            return "content"
        self._name, self._id = match["name"], match["id"] if self._grammar.own_ids else None
        return self._follow(state, marker)

    def _call_id(self, state: State) -> Reading[str | None]:
        written, marker = yield from self._word(state, lambda text: _NAME.fullmatch(text) is not None)
        if marker is None:
            return self._no_call(state)
        self._id = None if state.silent else written.strip() or None
        return self._follow(state, marker)

    def _no_call(self, state: State, junk: str = "") -> str | None:
        """Where a call does not go on: what stands here is content, with all of a call that has not been given out.

        Args:
            junk: what has been read of it.
        """
        if self._source.is_cut(state.markers) and not junk.strip():
            self._source.take(len(self._source.text))
            return None
        if self._source.marked:
            self._give_back()
        else:
            self._calls.end()
            self._read_content(junk)
        return "content"

    def _by_itself(self, state: State) -> Reading[str | None]:
        source, calls = self._source, self._calls
        match state.role:
            case Role.ARGUMENTS:
                yield from calls.arguments(source)
            case Role.CALLS:
                yield from calls.objects(source, keyed=self._grammar.keyed)
            case Role.PYTHON:
                yield from calls.python(source)
            case _:
                yield from calls.bare(source, self._grammar.quotes)
        if source.is_cut():
            return None
        if source.marked:
            self._give_back()
            return "content"
        return state.then

    def _dropped(self, state: State) -> Reading[str | None]:
        junk: list[str] = []
        if self._calls.pending:
            yield from self._source.run(SPACES)
            marker = yield from self._source.anchored(state.markers)
        else:
            marker = yield from self._search(state, junk.append)
        return self._no_call(state, "".join(junk)) if marker is None else self._follow(state, marker)

    def _parameter_key(self, state: State) -> Reading[str | None]:
        written, marker = yield from self._word(state, lambda text: _KEY.fullmatch(text) is not None)
        if marker is None:
            return self._no_call(state)
        self._key = written.strip()
        return self._follow(state, marker)

    def _parameter_value(self, state: State) -> Reading[str | None]:
        if state.string or self._calls.types(self._key) == _STRING:
            return (yield from self._string_value(state))
        pieces: list[str] = []
        marker = yield from self._search(state, pieces.append)
        text = "".join(pieces)
        if self._grammar.wrapped:
            text = text.removeprefix("\n").removesuffix("\n")
        if marker is None:
            self._calls.cut_parameter(self._key, text)
            return None
        self._calls.text_parameter(self._key, text)
        return self._follow(state, marker)

    def _string_value(self, state: State) -> Reading[str | None]:
        """A string is given out as it comes."""
        calls, wrapped = self._calls, self._grammar.wrapped
        at_start, end = True, ""

        def write(text: str) -> None:
            nonlocal at_start, end
            if wrapped:
                if at_start:
                    text = text.removeprefix("\n")
                text = end + text
                end = "\n" if text.endswith("\n") else ""
                text = text.removesuffix("\n")
            at_start = False
            calls.argue(escaped(text))

        calls.parameter(self._key)
        calls.argue('"')
        marker = yield from self._search(state, write)
        if marker is None:
            return None
        calls.argue('"')
        return self._follow(state, marker)

    def _elements(self, state: State) -> Reading[str | None]:
        source, tag = self._source, f"{self._grammar.before_tags}<"
        yield from source.run(SPACES)
        if (yield from source.anchored([tag])) is None:
            return self._no_call(replace(state, edges={tag: ""}))
        pieces: list[str] = []
        marker = yield from self._search(state, pieces.append)
        self._calls.elements("".join(pieces), before_tags=self._grammar.before_tags, whole=marker is not None)
        return None if marker is None else self._follow(state, marker)

    def _header(self, state: State) -> Reading[str | None]:
        pieces: list[str] = []
        marker = yield from self._search(state, pieces.append)
        if marker is None:
            return None
        self._follow(state, marker)
        header, target = "".join(pieces), state.then
        for pattern, place in state.routes:
            if match := re.search(pattern, header):
                target = place
                if name := match.groupdict().get("name"):
                    self._calls.begin(name)
                    self._calls.give()  # nothing else has such a header
                break
        if self._any_content and self._grammar.states[target].role is Role.CONTENT:
            self._spaces.append("\n")
        return target


@functools.cache
def _punctuation(markers: tuple[str, ...]) -> re.Pattern[str]:
    """White space and brackets that may stand between calls, but not those that a marker begins with."""
    first = {marker[0] for marker in markers}
    return re.compile(rf"[\s{re.escape(''.join(char for char in _PUNCTUATION if char not in first))}]*")
