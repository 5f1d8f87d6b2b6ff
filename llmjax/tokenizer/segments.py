"""Token ids of a text's segments, kept for the texts that come next: a conversation comes again with every turn.

A special token is cut out of a text before anything else happens to it, and what lies between two of them becomes
tokens by itself. So a text can be divided before any such token, and the ids of its segments are the text's.
"""

from __future__ import annotations

import itertools
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import tokenizers

# Of all segments that are kept; with their ids characters take up to 6 bytes each, mostly 2.
MOST_CHARS = 8 * 2**20
SHORTEST = 32  # characters of a segment that is worth a place


def safe_cuts(cut_out: Iterable[tokenizers.AddedToken], wanted: Iterable[str]) -> list[str]:
    """The wanted tokens before which a text can be divided, wherever one is spelled in it.

    That is so if nothing around a token decides whether it is cut out, and no other token can lie across it: the search
    for tokens takes the leftmost and there the longest, so it would find them in a part as it does in the whole.

    Args:
        cut_out: all tokens that are cut out of a text before it is normalized.
        wanted: texts of tokens.
    """
    tokens = {token.content: token for token in cut_out if token.content}
    cuts = []
    for text in dict.fromkeys(wanted):
        token = tokens.get(text)
        if token is None or token.lstrip or token.single_word or text[0].isspace():
            continue
        if not any(_lies_across(other, text) for other in tokens):
            cuts.append(text)
    return cuts


def _lies_across(other: str, text: str) -> bool:
    """Whether a token, or a second one of the same, may take a part of ``text``, or ``text`` with more."""
    if other != text and other.startswith(text):
        return True
    first = text[0]
    at = other.find(first, 1)
    while at > 0:
        end = other[at:]
        if text.startswith(end) or end.startswith(text):
            return True
        at = other.find(first, at + 1)
    return False


class SegmentCache:
    """Encodes texts segment by segment, and keeps the ids of those that were used last. Thread-safe.

    A segment that is kept takes less time than another, so whoever guesses one could learn that it was there. Those of
    one client are therefore not found for another.

    Args:
        cuts: texts of tokens before which a text can be divided.
        encode: ids of a text.
        most_chars: characters of all segments that are kept.
    """

    def __init__(
        self, cuts: Sequence[str], encode: Callable[[str], list[int]], *, most_chars: int = MOST_CHARS
    ) -> None:
        self._cut = re.compile("|".join(map(re.escape, cuts))) if cuts else None
        self._encode = encode
        self._most_chars = most_chars
        self._lock = threading.Lock()  # guards what follows
        # Segments but for the first one of a text begin with a token, so that the same text is never both.
        # By whom they are kept for, too. Least recently used first.
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._chars = 0

    def ids(self, text: str, *, kept_for: str) -> list[int]:
        """Token ids of a text.

        Args:
            kept_for: texts of the same one share segments; a salt of cached prefixes, say.
        """
        ids: list[int] = []
        for segment in self._segments(text):
            if len(segment) < SHORTEST:
                ids += self._encode(segment)
                continue
            with self._lock:
                if (kept := self._kept.get((kept_for, segment))) is not None:
                    self._kept.move_to_end((kept_for, segment))
            if kept is None:
                kept = array("i", self._encode(segment))
                self._keep(kept_for, segment, kept)
            ids += kept
        return ids

    def _segments(self, text: str) -> list[str]:
        places = [] if self._cut is None else [match.start() for match in self._cut.finditer(text)]
        bounds = [0, *(place for place in places if place), len(text)]
        return [text[begin:end] for begin, end in itertools.pairwise(bounds)]

    def _keep(self, kept_for: str, segment: str, ids: array[int]) -> None:
        if len(segment) > self._most_chars:
            return
        with self._lock:
            if (kept_for, segment) not in self._kept:
                self._kept[kept_for, segment] = ids
                self._chars += len(segment)
            while self._chars > self._most_chars:
                (_, oldest), _ = self._kept.popitem(last=False)
                self._chars -= len(oldest)
