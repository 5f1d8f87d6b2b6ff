"""Prompt lookup: guesses the next tokens of a text from an earlier place where its last tokens occur."""

from __future__ import annotations

from array import array

HEADS = 2**14  # chains; a power of two
CANDIDATES = 16  # places that a lookup looks at


class NgramIndex:
    """An index of the n-grams of a growing text, which finds matches as deflate (RFC 1951) does: by chains of the
    positions whose n-grams have equal hashes, the latest first.

    Takes 4 bytes a token and 64 KiB. Adding a token and a lookup each take a bounded time, whatever the length.

    Args:
        tokens: the text; its owner may append to it.
        shortest, longest: tokens of the shortest match, and most tokens that are compared.
    """

    def __init__(self, tokens: list[int], *, shortest: int, longest: int) -> None:
        self._tokens = tokens
        self._shortest = shortest
        self._longest = longest
        self._heads = array("i", [-1]) * HEADS
        self._before = array("i")  # by an n-gram's last place: the last place of the one before with that hash, or -1

    def continuation(self, count: int) -> tuple[int, ...]:
        """The ``count`` tokens after the latest of the longest matches of the text's end; empty: there is no match.

        Where they would go beyond the end of the text, the tokens after the match are taken to repeat.
        """
        self._catch_up()
        tokens = self._tokens
        end, best, length = len(tokens), -1, self._shortest - 1
        place = self._before[end - 1] if end else -1
        for _ in range(CANDIDATES):
            if place < 0 or length == self._longest:
                break
            same = self._equal(place, end - 1)
            if same > length:
                best, length = place, same
            place = self._before[place]
        if best < 0:
            return ()
        period = end - 1 - best
        return tuple([tokens[best + 1 + i % period] for i in range(count)])

    def _equal(self, one: int, other: int) -> int:
        """Tokens up to two places that are equal, ``longest`` at most."""
        tokens, same = self._tokens, 0
        while same < self._longest and same <= one and tokens[one - same] == tokens[other - same]:
            same += 1
        return same

    def _catch_up(self) -> None:
        tokens, heads, before, size = self._tokens, self._heads, self._before, self._shortest
        for place in range(len(before), len(tokens)):
            if place + 1 < size:
                before.append(-1)
                continue
            head = hash(tuple(tokens[place + 1 - size : place + 1])) % HEADS
            before.append(heads[head])
            heads[head] = place
