"""What ``Tokenizer`` asks of a vocabulary, and the two libraries that answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers

from llmjax.tokenizer.cutter import TokenCutter

if TYPE_CHECKING:
    import sentencepiece


class Backend(Protocol):
    """A vocabulary and its algorithm. Thread-safe."""

    vocab_size: int
    normalizes: bool  # texts are changed before they become tokens

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]: ...

    def encode_texts(
        self, first: str, second: str | None, *, limit: int | None, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """Token ids of a text, or of a pair, and the segment of each; of the texts as much as ``limit`` tokens hold,
        the longer one being cut first."""
        ...

    def cut_out(self) -> list[tokenizers.AddedToken]:
        """The tokens that are cut out of a text before it is normalized; each stretch between them is encoded alone."""
        ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...


# From this many characters on it costs less to encode without holding the interpreter lock than to hold it.
LONG_TEXT = 4096


def shares(lengths: Sequence[int], room: int) -> list[int]:
    """How much of one or two texts fits into ``room`` tokens, if the longer one is cut first."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    if min(lengths) <= room // 2:
        return [first, room - first] if first < second else [room - second, second]
    return [room - room // 2, room // 2]


class HuggingFaceBackend:
    """A pipeline of the ``tokenizers`` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # A tokenizer.json may carry the padding and truncation of its training run.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.normalizes = tokenizer.normalizer is not None

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same pipeline without its special tokens; a copy, because the switch is a state of the object."""
        copy = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        tokenizer = self.tokenizer if parse_special else self._plain
        if len(text) < LONG_TEXT:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        # `encode` holds the interpreter lock throughout; this lets go of it, and leaves out offsets that nobody needs.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_texts(
        self, first: str, second: str | None, *, limit: int | None, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        texts = [first] if second is None else [first, second]
        parts = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if limit is not None:
            around = self.tokenizer.num_special_tokens_to_add(len(texts) > 1) if add_special_tokens else 0
            room = max(0, limit - around)
            for part, count in zip(parts, shares([len(part.ids) for part in parts], room), strict=True):
                part.truncate(count)
        pair = parts[1] if len(parts) > 1 else None
        whole = self.tokenizer.post_process(parts[0], pair, add_special_tokens=add_special_tokens)
        return list(whole.ids), list(whole.type_ids)

    def cut_out(self) -> list[tokenizers.AddedToken]:
        return [token for token in self.tokenizer.get_added_tokens_decoder().values() if not token.normalized]

    def id_to_token(self, token_id: int) -> str | None:
        return self.tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)


@dataclass(frozen=True)
class CutRules:
    """Which tokens are cut out of the text, and what surrounds it.

    Args:
        special: control tokens by text; plain text when special tokens are not parsed.
        literal: tokens by text that are always matched first.
        before: ids before a text when special tokens are added.
        after: ids after a text when special tokens are added.
        between: ids between the texts of a pair; None: those after the first, then those before the second.
        added: tokens by text that the model's own vocabulary does not have, or has under another text.
        rewritten: makes what is divided into tokens of a text between those that are cut out; None: it stays as it is.
    """

    special: Mapping[str, int] = field(default_factory=dict)
    literal: Mapping[str, int] = field(default_factory=dict)
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    between: Sequence[int] | None = None
    added: Mapping[str, int] = field(default_factory=dict)
    rewritten: Callable[[str], str] | None = None


class SentencePieceBackend:
    """The ``sentencepiece`` library between tokens that are cut out first.

    Args:
        processor: a loaded model.
        rules: what is cut out and added.
        inner: a processor for the stretches that do not start the text, where those get no leading space; None:
            the same one.
    """

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        rules: CutRules,
        *,
        inner: sentencepiece.SentencePieceProcessor | None = None,
    ) -> None:
        self._outer: Any = processor
        self._inner: Any = inner or processor
        self.rules = rules
        self._every = TokenCutter({**rules.literal, **rules.special})
        self._literal = TokenCutter(rules.literal)
        self._pieces: int = processor.get_piece_size()
        self._added = {token_id: text for text, token_id in rules.added.items()}
        self.vocab_size = max([self._pieces - 1, *self._added]) + 1
        self.normalizes = True

    def serialized(self) -> bytes:
        """The model as a tokenizer.model file has it."""
        proto: bytes = self._outer.serialized_model_proto()
        return proto

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        ids = list(self.rules.before) if add_special_tokens else []
        processor = self._outer
        for piece in (self._every if parse_special else self._literal).cut(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += processor.encode(piece if self.rules.rewritten is None else self.rules.rewritten(piece))
            processor = self._inner
        if add_special_tokens:
            ids += self.rules.after
        return ids

    def encode_texts(
        self, first: str, second: str | None, *, limit: int | None, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        texts = [first] if second is None else [first, second]
        parts = [self.encode(text, add_special_tokens=False, parse_special=True) for text in texts]
        before, after, between = self.rules.before, self.rules.after, self.rules.between
        between = [*after, *before] if between is None else between
        if not add_special_tokens:
            before = after = between = ()
        around = len(before) + len(after) + (len(texts) - 1) * len(between)
        room = sum(map(len, parts)) if limit is None else max(0, limit - around)
        ids = [*before]
        for i, (part, count) in enumerate(zip(parts, shares([len(part) for part in parts], room), strict=True)):
            ids += [*(between if i else ()), *part[:count]]
        return [*ids, *after], [0] * (len(ids) + len(after))

    def cut_out(self) -> list[tokenizers.AddedToken]:
        texts = {**self.rules.literal, **self.rules.special}
        return [tokenizers.AddedToken(text, normalized=False) for text in texts]

    def id_to_token(self, token_id: int) -> str | None:
        if token_id in self._added:
            return self._added[token_id]
        return self._outer.id_to_piece(token_id) if 0 <= token_id < self._pieces else None

    def token_to_id(self, token: str) -> int | None:
        if token in self.rules.added:
            return self.rules.added[token]
        token_id: int = self._outer.piece_to_id(token)
        # The library answers an unknown piece with the id of <unk>.
        return token_id if self._outer.id_to_piece(token_id) == token else None
