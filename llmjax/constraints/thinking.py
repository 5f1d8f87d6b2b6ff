"""A budget of reasoning tokens: reasoning that is longer is closed, and the answer follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenMark:
    """An automaton that finds a text in tokens, however they divide it; it needs no vocabulary once it is made.

    In state s the tokens so far end with the first s bytes of the text (Knuth, Morris and Pratt). For ``</t>`` and the
    tokens ``<`` and ``</``, state 0 has {``<``: 1, ``</``: 2}, and in state 1 the token ``/t>`` leads to the end.

    Attributes:
        states: for each state, the next state by token if that differs from the one of state 0; in state 0, if it
            differs from 0. The last state, ``len(states)``, means that the text is complete.
    """

    states: tuple[dict[int, int], ...]

    @classmethod
    def of(cls, text: str, tokens: Sequence[bytes]) -> TokenMark:
        """The automaton of a text.

        Args:
            text: a text that is not empty.
            tokens: the bytes of each token of the vocabulary, by id.
        """
        data = text.encode()
        by_first: dict[int, list[int]] = {}
        holds, empty = [], []
        for token, piece in enumerate(tokens):
            if not piece:
                empty.append(token)
            else:
                by_first.setdefault(piece[0], []).append(token)
                if data[0] in piece:
                    holds.append(token)
        states = [{token: end for token in holds if (end := _end_of(tokens[token], data))}]
        for state in range(1, len(data)):
            # Every ending of the written bytes that is a beginning of the text may continue.
            begun = [size for size in range(1, state + 1) if data[:state].endswith(data[:size])]
            found = {}
            for token in {*empty, *(token for size in begun for token in by_first.get(data[size], ()))}:
                end = _end_of(data[:state] + tokens[token], data)
                if end != states[0].get(token, 0):
                    found[token] = end
            states.append(found)
        return cls(tuple(states))

    def after(self, state: int, token: int) -> int:
        """The state after one more token."""
        return self.states[state].get(token, self.states[0].get(token, 0))


def _end_of(written: bytes, text: bytes) -> int:
    """The number of bytes of the text that the end of the written bytes begins; all once it has occurred."""
    if text in written:
        return len(text)
    return next((size for size in range(min(len(text) - 1, len(written)), 0, -1) if written.endswith(text[:size])), 0)


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """The limit on a model's reasoning.

    Args:
        tokens: number of tokens that an output may have before its reasoning must end, the opening ones included.
        inside: whether the output begins inside its reasoning.
        start: finds the text that opens reasoning.
        end: finds the text that closes it.
        closing: tokens that are written to close it.
    """

    tokens: int
    inside: bool
    start: TokenMark
    end: TokenMark
    closing: tuple[int, ...]


class Thinking:
    """The state of one output's reasoning so far."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._inside = budget.inside
        self._state = 0
        self.left = budget.tokens  # tokens until reasoning must end

    def accept(self, token: int) -> None:
        """Reads the next token of the output."""
        self.left -= 1
        mark = self._budget.end if self._inside else self._budget.start
        self._state = mark.after(self._state, token)
        if self._state == len(mark.states):
            self._inside, self._state = not self._inside, 0

    @property
    def over(self) -> bool:
        """Whether the budget is used up, whether the output still reasons or not."""
        return self.left <= 0

    @property
    def closing(self) -> tuple[int, ...]:
        """The tokens to write once the budget is used up; none if the output does not reason."""
        return self._budget.closing if self._inside else ()
