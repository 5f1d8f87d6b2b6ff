"""Matchers of ``llguidance`` over a vocabulary, within its limits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# What a step may add to what a matcher knows: mostly it takes far below 1 ms. Some grammars make a step look at that
# again and again, which `StepMatcher` bounds; what making a matcher takes, nothing here bounds.
#
# An expression's text that has to come is walked through at the beginning: the fuel is for some 50,000 characters.
# Schemas whose expressions count what is counted inside (``(\\S+\\s+){0,49}``) need more, and get it where they do.
_INITIAL_FUEL = (200_000, 2_000_000)
_SCHEMAS = ('"json_schema"', "%json")  # signs of schemas in a grammar
_NO_FUEL = "initial lexer configuration"  # what the library's error begins with where it was not enough
STACK_BYTES = 2**28  # of memory that is taken only where it is needed
_STACK_SIZE = threading.Lock()  # of threads that are started from now on: a setting of the whole process


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens that a grammar is matched with.

    Args:
        tokens: the bytes of each, [logits].
        special: those that no text matches.
        eos: those that may end an output, at least one.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    eos: Sequence[int]

    # What TokenizerWrapper asks for.
    bos_token_id = None

    @property
    def eos_token_id(self) -> int:
        return self.eos[0]

    @property
    def special_token_ids(self) -> Sequence[int]:
        return self.special

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens that the text would be written in: the longest that fit. Where none does, the text is cut."""
        data = text.encode() if isinstance(text, str) else text
        ids, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                if (token := self._ids.get(data[at : at + size])) is not None:
                    ids.append(token)
                    break
            else:
                return ids
            at += size
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The first of tokens with the same bytes; each byte that no token has alone can only be part of another."""
        special = frozenset(self.special)
        found: dict[bytes, int] = {}
        for token, data in enumerate(self.tokens):
            if data and token not in special:
                found.setdefault(data, token)
        return found

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=1)

    def for_matchers(self) -> LLTokenizer:
        """The same as the library keeps it."""
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=list(self.eos))


def _limits(initial_fuel: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=20_000,
        initial_lexer_fuel=initial_fuel,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def make_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher whose first mask has been worked out: what is too much for a step mostly is so in the first.

    The library follows references and rules by calling itself, so it gets a stack for as many as there may be.
    """
    made: list[LLMatcher] = []

    def make() -> None:
        tries = _INITIAL_FUEL if any(sign in grammar for sign in _SCHEMAS) else _INITIAL_FUEL[:1]
        for fuel in tries:
            matcher = LLMatcher(vocabulary, grammar, limits=_limits(fuel), log_level=0)
            if not matcher.is_error() or not matcher.get_error().startswith(_NO_FUEL):
                break
        if not matcher.is_error():
            matcher.compute_bitmask()
        made.append(matcher)

    thread = threading.Thread(target=make, name="grammar", daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return made[0]
