"""Checks grammars, with limits on time and memory, and compiles them to matchers over a tokenizer's vocabulary."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer

from llmjax.constraints.grammars import grammar_of
from llmjax.constraints.matchers import Vocabulary, make_matcher
from llmjax.constraints.trial import GrammarRefused, GrammarTrial
from llmjax.errors import InvalidRequest
from llmjax.sampling.structured import StructuredOutputsParams
from llmjax.tokenizer import Tokenizer
from llmjax.turns import Turn

KEPT = 32  # number of recently used grammars that are kept, with their matchers
KEPT_CHARS = 2**21  # characters of those grammars together
KEPT_REFUSALS = 1024  # number of recently refused grammars that are remembered


class GrammarCompiler:
    """Checks grammars where requests come in, and makes matchers where the engine is; from any thread.

    A grammar is checked before it is compiled, in a process that may be killed: even a short one may take hours or all
    memory.

    Args:
        tokenizer: the tokenizer that defines the tokens.
        vocab_size: number of logits.
        eos_token_ids: tokens that may end an output.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._trial = GrammarTrial(lambda: self._own)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher | None] = OrderedDict()  # None: checked, but not compiled here
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # reasons, by the grammars' hashes

    def grammar(self, params: StructuredOutputsParams) -> str:
        """The grammar of a form of output, for ``check``; raises ``InvalidRequest``."""
        return grammar_of(params, special=self._cut)

    def known(self, grammar: str, *, field: str = "structured_outputs") -> bool:
        """Whether a grammar was checked or compiled recently; does not wait. Errors as for ``check``."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return True
            if (refused := self._refused.get(_hash(grammar))) is not None:
                self._refused.move_to_end(_hash(grammar))
                raise InvalidRequest(f"{field}: {refused}", field=field)
            return False

    def check(self, grammar: str, *, field: str = "structured_outputs", turn: Turn | None = None) -> None:
        """Tries a grammar, unless it is known.

        Args:
            field: the request's name for the grammar.
            turn: it is told if this takes long; an exception that it raises ends this call.

        Raises:
            InvalidRequest: the grammar is wrong, exceeds a limit, or nothing matches it.
        """
        if self.known(grammar, field=field):
            return
        if not self._eos:
            raise InvalidRequest(f"{field}: the model has no token that ends an output", field=field)
        try:
            if error := self._trial.error(grammar, turn=turn):
                raise GrammarRefused(_first_lines(error))
        except InvalidRequest as refused:
            if isinstance(refused, GrammarRefused):
                self._refuse(grammar, str(refused))
            raise InvalidRequest(f"{field}: {refused}", field=field) from None
        self._keep(grammar, None)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher of a grammar that has been checked, at the beginning of an output; callers copy it before it reads
        tokens."""
        with self._lock:
            matcher = self._kept.get(grammar)
        if matcher is None:
            matcher = make_matcher(self._vocabulary, grammar)
        if matcher.is_error():
            raise InvalidRequest(f"a grammar cannot be compiled: {_first_lines(matcher.get_error())}")
        self._keep(grammar, matcher)
        return matcher

    def _keep(self, grammar: str, matcher: LLMatcher | None) -> None:
        """Remembers that a grammar is right, and its matcher if it has been made."""
        with self._lock:
            self._kept[grammar] = matcher
            self._kept.move_to_end(grammar)
            while len(self._kept) > KEPT or sum(map(len, self._kept)) > KEPT_CHARS:
                self._kept.popitem(last=False)

    def _refuse(self, grammar: str, why: str) -> None:
        """Remembers a refusal, so that the grammar is refused immediately from now on."""
        with self._lock:
            self._refused[_hash(grammar)] = why
            if len(self._refused) > KEPT_REFUSALS:
                self._refused.popitem(last=False)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return self._own.for_matchers()

    @cached_property
    def _own(self) -> _OwnVocabulary:
        tokenizer = self._tokenizer
        special = sorted(token for token in tokenizer.all_special_ids if token < self._vocab_size)
        tokens = tokenizer.bytes_of_all(self._vocab_size)
        return _OwnVocabulary(tokens=tokens, special=special, eos=self._eos, tokenizer=tokenizer)

    def _cut(self, marker: str) -> list[int | str]:
        """Splits a marker into special tokens and the text between them."""
        tokenizer = self._tokenizer
        parts: list[int | str] = []
        ids = tokenizer.special_ids_in([marker])
        known = sorted(((tokenizer.id_to_token(id), id) for id in ids), key=lambda entry: -len(entry[0]))
        text, at = "", 0
        while at < len(marker):
            found = next(((token, id) for token, id in known if marker.startswith(token, at)), None)
            if found is None:
                text += marker[at]
                at += 1
                continue
            parts += [text] if text else []
            parts.append(found[1])
            text, at = "", at + len(found[0])
        return [*parts, text] if text else parts


@dataclass(frozen=True, kw_only=True)
class _OwnVocabulary(Vocabulary):
    """A tokenizer's vocabulary, which encodes texts as the tokenizer does."""

    tokenizer: Tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokenizer's tokens for a text, if they decode to exactly that text."""
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = self.tokenizer.encode(data.decode(), add_special_tokens=False, parse_special=False)
        except UnicodeDecodeError:
            ids = []
        if b"".join([self.tokens[token] for token in ids if token < len(self.tokens)]) == data:
            return ids
        return super().__call__(data)


def _hash(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


def _first_lines(message: str) -> str:
    """The essence of an error on one line."""
    for mark in ("<state>", "<backtrace>", "<non-verbose/>"):
        message = message.split(mark)[0]
    text = " ".join(message.split())
    if text.startswith("NoExtension"):
        return "the model's vocabulary has nothing that it can begin with"
    if text.startswith("panic"):
        return f"it is too large ({text})"
    return text if len(text) <= 400 else text[:400] + "…"
