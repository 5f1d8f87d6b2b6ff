"""Makes matchers of ``llguidance`` over a vocabulary, within the library's limits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# Limits on the items that a step may add to a matcher's state; a step mostly takes far less than 1 ms. Some grammars
# make a step search its state again and again, which `StepMatcher` limits; nothing here limits making a matcher.
#
# The required text of an expression is walked through at the beginning: the fuel suffices for some 50,000 characters.
# Schemas with nested counts in expressions (``(\\S+\\s+){0,49}``) need more, and get it.
_INITIAL_FUEL = (200_000, 2_000_000)
_SCHEMAS = ('"json_schema"', "%json")  # signs of schemas in a grammar
_NO_FUEL = "initial lexer configuration"  # the beginning of the library's error if the fuel was not enough
STACK_BYTES = 2**28  # address space; memory is used only as far as needed
_STACK_SIZE = threading.Lock()  # the stack size of new threads is a setting of the whole process


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens that a grammar is matched with.

    Args:
        tokens: the bytes of each, [logits].
        special: ids of special tokens, which no text matches.
        eos: ids of tokens that may end an output, at least one.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    eos: Sequence[int]

    # The attributes that TokenizerWrapper needs.
    bos_token_id = None

    @property
    def eos_token_id(self) -> int:
        return self.eos[0]

    @property
    def special_token_ids(self) -> Sequence[int]:
        return self.special

    def __call__(self, text: str | bytes) -> list[int]:
        """Encodes a text with the longest tokens that fit; where none does, the text is cut."""
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
        """The first token for each byte string; a byte without a token of its own only occurs inside longer tokens."""
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
        """The vocabulary in the library's form."""
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
    """Makes a matcher and computes its first mask, since grammars that exceed a step's limits mostly do so there.

    The library follows references and rules recursively, so it gets a stack that is large enough.
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
