"""Stop strings: found in streamed text, and never shown by mistake before it is clear whether they are there."""

from __future__ import annotations

from collections.abc import Sequence

from llmjax.parsing.scanner import MarkerScanner


class StopMatcher:
    """Watches the text of one continuation.

    Args:
        stops: strings that end it.
        include: whether the stop string itself belongs to the output.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._scanner = MarkerScanner(stops) if stops else None
        self._state = 0
        self._include = include
        self._held = ""  # text that may be the beginning of a stop string
        self.found: str | None = None  # the stop string that ended the text

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Takes new text and returns what may be shown; nothing after a stop string was found.

        Args:
            may_stop: False while ``min_tokens`` is not reached: a stop string counts as plain text.
        """
        if self._scanner is None:
            return text
        if self.found is not None:
            return ""
        held = len(self._held)
        text = self._held + text
        self._held = ""
        scan = self._scanner.scan(text, state=self._state, start=held)
        while scan.marker is not None and not may_stop:
            scan = self._scanner.scan(text, state=scan.state, start=scan.end)
        self._state, self.found = scan.state, scan.marker
        if self.found is not None:
            return text[: scan.end if self._include else scan.end - len(self.found)]
        shown = len(text) - self._scanner.held(scan.state)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, at an end without a stop string."""
        held, self._held = self._held, ""
        return held
