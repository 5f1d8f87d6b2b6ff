"""Stop strings: finds them in streamed text, and holds text back while it may be the beginning of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmjax.parsing.content import ContentReading
from llmjax.parsing.scanner import MarkerScanner


class StopMatcher:
    """Watches the text of one continuation.

    Args:
        stops: strings that end it, if they are in content.
        include: whether the stop string itself belongs to the output.
        reading: which text is content; None: all of it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool, reading: ContentReading | None = None) -> None:
        self._scanner = MarkerScanner(stops) if stops else None
        self._state = 0
        self._include = include
        self._one_call = reading is not None and reading.one_call
        self._parser = reading.parser() if reading is not None and self.active else None
        self._before = 0 if self._parser is None else self._parser.fed  # characters that the parser had read
        self._held = ""  # text that is not shown yet
        self._new: list[str] = []  # what follows it, of which nothing is known yet
        self._certain = 0  # characters of which it is known whether they are content
        self._shown = 0  # characters that are shown
        self._seen = 0  # characters that have been searched, or are not to be
        self._span = 0  # index in the parser's content of the next piece to search
        self._leading = False  # white space that does not count: it stands before all else in a piece of content
        self.found: str | None = None  # the stop string that ended the text
        self.end: int | None = None  # characters up to the end of the stop string, or of the only call

    @property
    def active(self) -> bool:
        """Whether anything may end the text."""
        return self._scanner is not None or self._one_call

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Takes new text and returns what may be shown; nothing behind what has ended it.

        Args:
            may_stop: False while ``min_tokens`` is not reached: a stop string counts as plain text.
        """
        if not self.active:
            return text
        if self.end is not None:
            return ""
        self._new.append(text)
        if self._parser is not None:
            self._parser.feed(text)
            if self._parser.certain - self._before <= self._certain:
                return ""
            self._certain = self._parser.certain - self._before
        else:
            self._certain += len(text)
        self._take_new()
        return self._advance(self._certain, may_stop=may_stop)

    def finish(self) -> str:
        """What was held back, at the end of the text, in which a stop string may be found yet."""
        shown = ""
        if self._parser is not None and self.end is None:
            self._parser.finish()
            self._take_new()
            shown = self._advance(self._shown + len(self._held), may_stop=True)
        held, self._held = self._held, ""
        return shown if self.end is not None else shown + held

    def _take_new(self) -> None:
        self._held = "".join([self._held, *self._new])
        self._new.clear()

    def _advance(self, certain: int, *, may_stop: bool) -> str:
        """Searches up to ``certain`` characters, and returns what may be shown."""
        call_end = None if self._parser is None or not self._one_call else self._parser.first_call_end
        if call_end is not None:
            certain = min(certain, call_end - self._before)
        possible = 0  # characters at the end that may begin a stop string
        if self._scanner is not None:
            for start, end in self._content(certain):
                if self._search(self._scanner, start, end, may_stop=may_stop):
                    assert self.found is not None and self.end is not None
                    return self._show(self.end if self._include else self.end - len(self.found))
            if self._seen == certain:
                possible = self._scanner.held(self._state)
        if call_end is not None and certain == call_end - self._before:
            self.end = certain
            return self._show(certain)
        return self._show(certain - possible)

    def _show(self, end: int) -> str:
        count = max(end - self._shown, 0)
        text, self._held = self._held[:count], self._held[count:]
        self._shown += count
        return text

    def _content(self, certain: int) -> Iterator[tuple[int, int]]:
        """The next pieces of content before ``certain``, without white space in front."""
        if self._parser is None:
            yield self._seen, certain
            self._seen = certain
            return
        spans = self._parser.content
        while self._span < len(spans):
            begin, end = (max(place - self._before, 0) for place in spans[self._span : self._span + 2])
            if begin >= self._seen and spans[self._span] > 0:
                self._state, self._leading = 0, True
            start, end = max(begin, self._seen), min(end, certain)
            if self._leading and start < end:
                piece = self._held[start - self._shown : end - self._shown].lstrip()
                start, self._leading = end - len(piece), not piece
            if start < end:
                yield start, end
            self._seen = max(self._seen, end)
            if self._span + 2 == len(spans):
                return
            self._span += 2

    def _search(self, scanner: MarkerScanner, start: int, end: int, *, may_stop: bool) -> bool:
        """Whether a stop string ends between two places."""
        text = self._held if end - self._shown == len(self._held) else self._held[: end - self._shown]
        scan = scanner.scan(text, state=self._state, start=start - self._shown)
        while scan.marker is not None and not may_stop:
            scan = scanner.scan(text, state=scan.state, start=scan.end)
        self._state, self.found = scan.state, scan.marker
        if self.found is not None:
            self.end = self._shown + scan.end
        return self.found is not None
