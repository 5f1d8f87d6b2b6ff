"""Stop strings: found in streamed text, and never shown by mistake before it is clear whether they are there."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches the text of one continuation.

    Args:
        stops: strings that end it.
        include: whether the stop string itself belongs to the output.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._include = include
        self._held = ""  # text that may be the beginning of a stop string
        self.found: str | None = None  # the stop string that ended the text

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Takes new text and returns what may be shown; nothing after a stop string was found.

        Args:
            may_stop: False while ``min_tokens`` is not reached: a stop string counts as plain text.
        """
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        held = len(self._held)
        text = self._held + text
        self._held = ""
        if may_stop:
            # What ends in the held text came while nothing might stop, or it would have been found then.
            hits = [(at, stop) for stop in self._stops if (at := text.find(stop, max(0, held + 1 - len(stop)))) >= 0]
            if hits:
                # The one that is complete first, as if the text had come character by character.
                at, self.found = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
                return text[: at + len(self.found)] if self._include else text[:at]
        return self._hold_back(text)

    def finish(self) -> str:
        """What was held back, at an end without a stop string."""
        held, self._held = self._held, ""
        return held

    def _hold_back(self, text: str) -> str:
        """Keeps the longest end of ``text`` that begins a stop string; returns the rest."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(length < len(stop) and stop.startswith(tail) for stop in self._stops):
                self._held = tail
                return text[:-length]
        return text
