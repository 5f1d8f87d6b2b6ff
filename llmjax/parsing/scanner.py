"""Markers found in streamed text: an automaton that reads every character once, however the text was cut."""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """What has been read ends with the path to this node, and with no longer beginning of a marker."""

    next: dict[str, int] = field(default_factory=dict)
    fail: int = 0  # the longest proper end of the path that is a path too
    depth: int = 0
    marker: str | None = None  # the longest marker that the path ends with


@dataclass(frozen=True, slots=True)
class Scan:
    """How far a scan has come.

    Args:
        state: where to go on; 0 at a beginning.
        end: characters of the text that have been read.
        marker: the one that is complete at ``end``; None: the text has ended first.
    """

    state: int
    end: int
    marker: str | None = None


class MarkerScanner:
    """Finds the marker that is complete first, of several with the same end the longest (Aho and Corasick, 1975).

    Args:
        markers: not empty strings.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        self._nodes = [_Node()]
        for marker in markers:
            self._add(marker)
        self._link()
        # Anything else leaves the root where it is: most text is passed over at the speed of a regular expression.
        first = "".join(map(re.escape, self._nodes[0].next))
        self._first = re.compile(f"[{first}]") if first else None

    def scan(self, text: str, *, state: int = 0, start: int = 0) -> Scan:
        """Reads ``text`` from ``start`` up to the end of the first marker, or all of it.

        Args:
            state: state of the scan that this one continues.
        """
        nodes, first = self._nodes, self._first
        at, end = start, len(text)
        while at < end:
            if state == 0:
                match = first.search(text, at) if first is not None else None
                if match is None:
                    return Scan(0, end)
                at = match.start()
            char = text[at]
            node = nodes[state]
            while char not in node.next and state:
                state = node.fail
                node = nodes[state]
            state = node.next.get(char, 0)
            at += 1
            if (marker := nodes[state].marker) is not None:
                return Scan(state, at, marker)
        return Scan(state, end)

    def held(self, state: int) -> int:
        """How many of the last characters begin a marker that is not complete yet."""
        node = self._nodes[state]
        while node.depth and not node.next:
            node = self._nodes[node.fail]
        return node.depth

    def _add(self, marker: str) -> None:
        at = 0
        for char in marker:
            nodes = self._nodes
            if char not in nodes[at].next:
                nodes[at].next[char] = len(nodes)
                nodes.append(_Node(depth=nodes[at].depth + 1))
            at = nodes[at].next[char]
        self._nodes[at].marker = marker

    def _link(self) -> None:
        nodes = self._nodes
        queue = deque(nodes[0].next.values())  # their path has no proper end but the empty one
        while queue:
            parent = nodes[queue.popleft()]
            for char, child in parent.next.items():
                fail = parent.fail
                while char not in nodes[fail].next and fail:
                    fail = nodes[fail].fail
                nodes[child].fail = nodes[fail].next.get(char, 0)
                nodes[child].marker = nodes[child].marker or nodes[nodes[child].fail].marker
                queue.append(child)


@functools.lru_cache(maxsize=256)
def scanner_of(markers: tuple[str, ...]) -> MarkerScanner:
    """A scanner, made once for those who look for the same markers."""
    return MarkerScanner(markers)
