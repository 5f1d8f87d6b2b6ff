"""Compiles grammars to matchers over a tokenizer's vocabulary, with limits on time and memory."""

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

KEPT = 32  # number of recently used matchers that are kept
KEPT_CHARS = 2**21  # characters of those grammars together
KEPT_REFUSALS = 1024  # number of recently refused grammars that are remembered


class GrammarCompiler:
    """Makes matchers, from any thread.

    Args:
        tokenizer: the tokenizer that defines the tokens.
        vocab_size: number of logits.
        eos_token_ids: tokens that may end an output.
        trusted: whether grammars have already been compiled elsewhere; others are tried in another process first,
            because even short ones may take hours or all memory.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int], trusted: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._trial = None if trusted else GrammarTrial(lambda: self._own)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # reasons, by the grammars' hashes

    def grammar(self, params: StructuredOutputsParams) -> str:
        """The grammar of a form of output, for ``matcher``; raises ``InvalidRequest``."""
        return grammar_of(params, special=self._cut)

    def known(self, grammar: str, *, field: str = "structured_outputs") -> LLMatcher | None:
        """The matcher of a recently used grammar, without waiting; None: unknown. Errors as for ``matcher``."""
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept
            if (refused := self._refused.get(_hash(grammar))) is not None:
                self._refused.move_to_end(_hash(grammar))
                raise InvalidRequest(f"{field}: {refused}", field=field)
            return None

    def matcher(self, grammar: str, *, field: str = "structured_outputs", turn: Turn | None = None) -> LLMatcher:
        """A matcher at the beginning of an output; callers copy it before it reads tokens.

        Args:
            field: the request's name for the grammar.
            turn: it is told if this takes long; an exception that it raises ends this call.

        Raises:
            InvalidRequest: the grammar is wrong, exceeds a limit, or nothing matches it.
        """
        if (kept := self.known(grammar, field=field)) is not None:
            return kept
        if not self._eos:
            raise InvalidRequest(f"{field}: the model has no token that ends an output", field=field)
        try:
            matcher = self._made(grammar, turn)
        except InvalidRequest as refused:
            if isinstance(refused, GrammarRefused):
                self._refuse(grammar, str(refused))
            raise InvalidRequest(f"{field}: {refused}", field=field) from None
        with self._lock:
            self._kept[grammar] = matcher
            while len(self._kept) > KEPT or sum(map(len, self._kept)) > KEPT_CHARS:
                self._kept.popitem(last=False)
        return matcher

    def _made(self, grammar: str, turn: Turn | None) -> LLMatcher:
        error = "" if self._trial is None else self._trial.error(grammar, turn=turn)
        if not error:
            matcher = make_matcher(self._vocabulary, grammar)
            if not matcher.is_error():
                return matcher
            error = matcher.get_error()
        raise GrammarRefused(_first_lines(error))

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
