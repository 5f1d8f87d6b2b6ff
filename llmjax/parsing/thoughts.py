"""Calls in reasoning: they are thoughts where it is closed later, and the answer where it never is."""

from __future__ import annotations

from typing import Protocol

from llmjax.parsing.events import Content, Event


class CallReader(Protocol):
    """What `OutputParser` is here."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self, *, whole: bool = False) -> list[Event]: ...


class Thoughts:
    """The text of one reasoning, which a parser of calls reads along: what is content to it is reasoning for certain.

    From the beginning of a call on, all is kept until it is known whether the reasoning is closed.

    Args:
        parser: None: there are no calls.
    """

    def __init__(self, parser: CallReader | None) -> None:
        self._parser = parser
        self._held: list[str] = []  # text of which it is not known yet
        self._events: list[Event] = []  # from the first call on
        self.shown = 0  # characters that are reasoning

    def add(self, text: str) -> str:
        """Takes more text, and returns what is reasoning for certain."""
        if self._parser is None:
            self.shown += len(text)
            return text
        self._held.append(text)
        return self._certain(self._parser.feed(text))

    def closed(self) -> str:
        """The rest of the text: the reasoning is closed, and all of it is reasoning."""
        return "".join(self._held)

    def ended(self, *, whole: bool) -> tuple[str, list[Event]]:
        """The rest of the reasoning, and calls with what is around them: there is no more text.

        Args:
            whole: see `OutputParser.finish`.
        """
        if self._parser is None:
            return "", []
        return self._certain(self._parser.finish(whole=whole)), self._events

    def _certain(self, events: list[Event]) -> str:
        shown = []
        for event in events:
            if not self._events and isinstance(event, Content):
                shown.append(event.text)
            else:
                self._events.append(event)
        text = "".join(shown)
        if text:
            self._held = ["".join(self._held)[len(text) :]]
            self.shown += len(text)
        return text
