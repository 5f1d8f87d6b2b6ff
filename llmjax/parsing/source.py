"""Streamed text as parsers read it: a parser is a generator that yields when it needs more."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from llmjax.parsing.scanner import MarkerScanner

T = TypeVar("T")
# Yields while it waits for text, and returns a T. It looks at characters alone, never at where the text was cut.
Reading = Generator[None, None, T]

SPACES = re.compile(r"\s*")


class Source:
    """The text that has come and has not been read.

    What was read since ``mark`` is remembered, so that a reader that has found something else than it expected can give
    it back as plain text.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.closed = False
        self._before = 0
        self._marked: list[str] | None = None
        self._mark_at = 0

    @property
    def position(self) -> int:
        """Characters read since the beginning."""
        return self._before + self.at

    @property
    def marked(self) -> bool:
        return self._marked is not None

    @property
    def certain(self) -> int:
        """Characters that have been read and cannot be given back."""
        return self.position if self._marked is None else self._mark_at

    def push(self, text: str) -> None:
        self._before += self.at
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        """Reads up to ``end``, or to the end of what has come."""
        piece = self.text[self.at : end]
        self.at += len(piece)
        if self._marked is not None:
            self._marked.append(piece)
        return piece

    def mark(self) -> None:
        if self._marked is None:
            self._marked, self._mark_at = [], self.position

    def unmark(self) -> str:
        """What was read since the mark, which is gone."""
        text = "".join(self._marked or ())
        self._marked = None
        return text

    def peek(self) -> Reading[str]:
        """The next character, unread; empty at the end."""
        while self.at == len(self.text):
            if self.closed:
                return ""
            yield
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str], keep: list[str] | None = None) -> Reading[None]:
        """Reads all characters that ``pattern``, a class with a star, takes.

        Args:
            keep: gets them, piece by piece.
        """
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            if match.end() > self.at:
                piece = self.take(match.end())
                if keep is not None:
                    keep.append(piece)
            if self.at < len(self.text) or self.closed:
                return
            yield

    def spaces(self) -> Reading[str]:
        """Reads white space and returns the next character, unread."""
        yield from self.run(SPACES)
        return (yield from self.peek())

    def anchored(self, markers: Iterable[str]) -> Reading[str | None]:
        """The longest of ``markers`` that stands here, unread; None: none does."""
        possible = list(markers)
        longest = max(map(len, possible), default=0)
        while True:
            here = self.text[self.at : self.at + longest]
            possible = [marker for marker in possible if marker.startswith(here) or here.startswith(marker)]
            if self.closed or all(len(marker) <= len(here) for marker in possible):
                return max((marker for marker in possible if here.startswith(marker)), key=len, default=None)
            yield

    def is_cut(self, markers: Iterable[str] = ()) -> bool:
        """Whether the text has ended here, or within one of ``markers``."""
        rest = self.text[self.at :]
        return self.closed and (not rest or any(marker.startswith(rest) for marker in markers))


class Search:
    """A search for markers in a source, which gives out the text before them as soon as it is certain.

    Args:
        scanner: finds the markers.
        within: the text is a call's: a beginning of a marker at the text's end is not given out.
    """

    def __init__(self, source: Source, scanner: MarkerScanner, *, within: bool = False) -> None:
        self._within = within
        self._source = source
        self._scanner = scanner
        self._state = 0
        self._seen = 0  # characters after the source's position that were scanned
        self.marker: str | None = None

    def step(self) -> str:
        """Reads what comes before a marker, and no more of a marker than that; sets ``marker`` if one is complete."""
        source = self._source
        scan = self._scanner.scan(source.text, state=self._state, start=source.at + self._seen)
        self._state, self.marker = scan.state, scan.marker
        if scan.marker is not None:
            return source.take(scan.end - len(scan.marker))
        held = 0 if source.closed and not self._within else self._scanner.held(scan.state)
        self._seen = held
        return source.take(scan.end - held)
