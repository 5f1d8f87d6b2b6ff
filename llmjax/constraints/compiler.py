"""Grammars as matchers over a tokenizer's vocabulary, bounded in time and memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from llmjax.constraints.grammars import grammar_of
from llmjax.errors import InvalidRequest
from llmjax.sampling.masks import mask_words
from llmjax.sampling.structured import StructuredOutputsParams
from llmjax.tokenizer import Tokenizer

# A step's work is at most some 0.1 s, and mostly far below 1 ms; making a matcher takes at most about 1 s.
LIMITS = LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)
STACK_BYTES = 2**28  # of memory that is taken only where it is needed
KEPT = 32  # matchers of grammars that were asked for last
KEPT_CHARS = 2**21  # of those grammars together


class GrammarCompiler:
    """Makes matchers. Any thread may; two do not work at a time, so that no request's grammar takes all cores.

    Args:
        tokenizer: whose tokens they read.
        vocab_size: number of logits.
        eos_token_ids: tokens that may end an output.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def grammar(self, params: StructuredOutputsParams) -> str:
        """The grammar of a form, for ``matcher``; raises ``InvalidRequest``."""
        return grammar_of(params, special=self._cut)

    def matcher(self, grammar: str, *, field: str = "structured_outputs") -> LLMatcher:
        """A matcher at the beginning of an output, to be copied by those who let it read.

        Args:
            field: what the request calls the grammar.

        Raises:
            InvalidRequest: the grammar is wrong, needs too much, or nothing matches it.
        """
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept
            if not self._eos:
                raise InvalidRequest(f"{field}: the model has no token that ends an output", field=field)
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            matcher = self._made(self._vocabulary, grammar)
            if matcher.is_error():
                raise InvalidRequest(f"{field}: {_first_lines(matcher.get_error())}", field=field)
            self._kept[grammar] = matcher
            while len(self._kept) > KEPT or sum(map(len, self._kept)) > KEPT_CHARS:
                self._kept.popitem(last=False)
            return matcher

    def _made(self, vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
        """The matcher, whose first mask has been worked out: what is too much for a step mostly is so in the first.

        The library follows references and rules by calling itself, so it gets a stack for as many as there may be.
        """
        made: list[LLMatcher] = []

        def make() -> None:
            matcher = LLMatcher(vocabulary, grammar, limits=LIMITS, log_level=0)
            if not matcher.is_error():
                mask = np.zeros(mask_words(self._vocab_size), np.int32)
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            made.append(matcher)

        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=make, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join()
        return made[0]

    def _make_vocabulary(self) -> LLTokenizer:
        wrapper = TokenizerWrapper(_Vocabulary(self._tokenizer, vocab_size=self._vocab_size, eos=self._eos[0]))
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self._eos)

    def _cut(self, marker: str) -> list[int | str]:
        """Special tokens in a marker, and the text between them."""
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


class _Vocabulary:
    """A tokenizer as ``TokenizerWrapper`` wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos
        self.tokens = tokenizer.bytes_of_all(vocab_size)
        self.special_token_ids = sorted(token for token in tokenizer.all_special_ids if token < vocab_size)
        special = frozenset(self.special_token_ids)
        # The first of tokens with the same bytes; each byte that no token has alone can only be part of another.
        self._ids: dict[bytes, int] = {}
        for token, data in enumerate(self.tokens):
            if data and token not in special:
                self._ids.setdefault(data, token)
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens that the text would be written in; those of the tokenizer where they stand for exactly that."""
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode(data.decode(), add_special_tokens=False, parse_special=False)
        except UnicodeDecodeError:
            ids = []
        if b"".join([self.tokens[token] for token in ids if token < len(self.tokens)]) == data:
            return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
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


def _first_lines(message: str) -> str:
    """The gist of an error on one line."""
    for mark in ("<state>", "<backtrace>", "<non-verbose/>"):
        message = message.split(mark)[0]
    text = " ".join(message.split())
    if text.startswith("NoExtension"):
        return "the model's vocabulary has nothing that it can begin with"
    if text.startswith("panic"):
        return f"it is too large ({text})"
    return text if len(text) <= 400 else text[:400] + "…"
