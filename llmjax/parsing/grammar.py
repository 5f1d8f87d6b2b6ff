"""How a family of models writes reasoning and tool calls, as data: states, and the markers between them."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace


class Role(enum.Enum):
    """What the text of a state means. Text is read up to one of the state's markers, but where it says otherwise."""

    CONTENT = enum.auto()
    REASONING = enum.auto()
    # One of the markers stands here, perhaps after white space, or all of it is content.
    START = enum.auto()
    # The same after a call, where it may also follow brackets and other punctuation, which are dropped.
    BETWEEN = enum.auto()
    NAME = enum.auto()
    ID = enum.auto()
    ARGUMENTS = enum.auto()  # one JSON value, which ends by itself
    CALLS = enum.auto()  # JSON objects of name and arguments, in a list or not, which end by themselves
    PYTHON = enum.auto()  # f(a=1), g(): Python's calls with literals, in a list or not, which end by themselves
    BARE = enum.auto()  # an object whose keys and strings have no quotes or those of the grammar; ends by itself
    PARAMETERS = enum.auto()  # between the parameters of a call; dropped
    KEY = enum.auto()
    VALUE = enum.auto()  # text, whose type the tool's schema says
    ELEMENTS = enum.auto()  # elements that are called as the parameters are, one in another
    HEADER = enum.auto()  # says what the next state is


@dataclass(frozen=True, kw_only=True)
class State:
    """A place in a grammar.

    Args:
        role: what the text means.
        edges: name of the state that follows each marker.
        kept: the same for markers that belong to the text of that state.
        then: the state after what ends by itself, or where no marker stands.
        routes: for a header: patterns, with the state that the first one found in it leads to; a group "name" is the
            tool of a call.
        string: for a value: it is a string, whatever the schema says.
        silent: the marker that leads here is dropped, even if no call follows; an id is none that a call has.
        known: for a name: it makes a call only if there is such a tool.
    """

    role: Role
    edges: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    then: str = "content"
    routes: tuple[tuple[str, str], ...] = ()
    string: bool = False
    silent: bool = False
    known: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.edges, *self.kept)

    def target(self, marker: str) -> str:
        return self.edges[marker] if marker in self.edges else self.kept[marker]


NAME = re.compile(r"(?P<id>(?P<name>.*))", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A language of output.

    Args:
        states: by name; "content" is one of them.
        initial: where it begins.
        known_tools: calls have no marker of their own, so that only names of tools that there are make one.
        own_ids: the name of a call is written as its id, of which ``name`` finds the name.
        name: what of a written name is the tool's.
        quotes: what stands on either side of strings (``Role.BARE``).
        before_tags: what stands before the tags of elements (``Role.ELEMENTS``).
        wrapped: values stand on lines of their own, whose ends do not belong to them.
        keyed: a call in JSON is an object with the name as its only key, and the arguments as its value.
        short_ids: ids of calls have nine letters and digits, or the template refuses them.
        thoughts: how calls are found in reasoning that is never closed; None: there are none.
    """

    states: Mapping[str, State]
    initial: str = "content"
    known_tools: bool = False
    own_ids: bool = False
    name: re.Pattern[str] = NAME
    quotes: str = '"'
    before_tags: str = ""
    wrapped: bool = False
    keyed: bool = False
    short_ids: bool = False
    thoughts: Grammar | None = None

    @property
    def markers(self) -> Iterator[str]:
        """All of them, of any state."""
        for state in self.states.values():
            yield from state.markers
        yield self.quotes

    def beginning(self, state: str) -> Grammar:
        return replace(self, initial=state)
