"""Tokenizers out of the metadata of GGUF files.

Keys and defaults: ggml-org/llama.cpp, ``src/llama-vocab.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from llmjax.errors import TokenizerError
from llmjax.tokenizer import sentencepiece_proto as proto
from llmjax.tokenizer.backend import CutRules, HuggingFaceBackend, SentencePieceBackend
from llmjax.tokenizer.chat_template import ChatTemplate
from llmjax.tokenizer.pieces import SPACE, ByteLevelPieces, PieceDecoder, SpacePieces, WordPieces
from llmjax.tokenizer.pretokenizers import PreTokenizer, pre_tokenizer_named
from llmjax.tokenizer.sentencepiece_proto import ModelType, Pieces, PieceType
from llmjax.tokenizer.tokenizer import SpecialTokens, Tokenizer

# Texts that end a turn or a document, whatever the file's keys say.
END_MARKERS = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "_<EOT>",
        "< EOT >",
        "[EOT]",
        "[EOS]",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
    ]
)

_PREFIX = "tokenizer.ggml."


class Vocabulary:
    """The ``tokenizer.ggml.*`` keys of a file, checked.

    Args:
        metadata: by key, as ``GGUFFile.metadata`` has it.
        source: the file, for messages.

    Attributes:
        tokens: texts by id, made unique.
        types: [V] int32, values of PieceType.
    """

    def __init__(self, metadata: Mapping[str, Any], *, source: str) -> None:
        self._metadata = metadata
        self._source = source
        tokens = self._get("tokens", list)
        if tokens is None or not all(isinstance(token, str) for token in tokens):
            self.fail("tokens is missing or is not an array of strings")
        self.tokens = _unique(tokens)
        types = self._numbers("token_type", np.integer)
        self.types = np.full(len(tokens), PieceType.NORMAL, np.int32) if types is None else types.astype(np.int32)
        self.types[~np.isin(self.types, list(PieceType))] = PieceType.NORMAL
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        # A marker of the end that the converter took for an ordinary word is still one.
        for marker in END_MARKERS & self.ids.keys():
            self.types[self.ids[marker]] = PieceType.CONTROL

    def fail(self, message: str) -> NoReturn:
        raise TokenizerError(f"{self._source}: {_PREFIX}{message}")

    def _get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        value = self._metadata.get(_PREFIX + key)
        if value is not None and not isinstance(value, kind):
            self.fail(f"{key} has the wrong type ({type(value).__name__})")
        return value

    def _numbers(self, key: str, kind: type) -> np.ndarray | None:
        """A numeric array, one entry a token at least."""
        array = self._get(key, np.ndarray)
        if array is None:
            return None
        if not np.issubdtype(array.dtype, kind) or array.ndim != 1 or len(array) < len(self.tokens):
            self.fail(f"{key} is not {len(self.tokens)} numbers")
        return np.asarray(array[: len(self.tokens)])

    def scores(self) -> np.ndarray:
        scores = self._numbers("scores", np.number)
        return np.zeros(len(self.tokens), np.float32) if scores is None else scores.astype(np.float32)

    def text(self, key: str, default: str = "") -> str:
        value: str | None = self._get(key, str)
        return default if value is None else value

    def flag(self, key: str, default: bool) -> bool:
        value: bool | None = self._get(key, bool)
        return default if value is None else value

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """An id from ``<key>_token_id``; None if there is none or it lies outside the vocabulary."""
        value = self._get(key + "_token_id", (int, np.integer))
        token_id = default if value is None else int(value)
        return token_id if token_id is not None and 0 <= token_id < len(self.tokens) else None

    def of_type(self, *types: PieceType) -> dict[str, int]:
        return {self.tokens[i]: i for i in np.flatnonzero(np.isin(self.types, types)).tolist()}

    def has_byte_tokens(self) -> bool:
        """Whether there is a token for each byte; some of them only are an error."""
        byte_tokens = self.of_type(PieceType.BYTE)
        if byte_tokens and byte_tokens.keys() != {f"<0x{byte:02X}>" for byte in range(256)}:
            self.fail("tokens has byte tokens, but not <0x00> to <0xFF>")
        return bool(byte_tokens)

    def merges(self) -> list[tuple[str, str]]:
        merges = self._get("merges", list)
        if merges is None:
            self.fail("merges is missing")
        pairs = []
        for merge in merges:
            left, space, right = merge[1:].partition(" ")
            if not space:
                self.fail(f"merges has an entry that is not a pair: {merge!r}")
            pairs.append((merge[0] + left, right))
        return pairs

    def charsmap(self) -> bytes:
        """The compiled replacement table of a Unigram model's normalizer."""
        array = self._get("precompiled_charsmap", np.ndarray)
        if array is None:
            return b""
        if array.dtype not in (np.int8, np.uint8):
            self.fail("precompiled_charsmap is not an array of bytes")
        return bytes(array.tobytes())


def _unique(tokens: Sequence[str]) -> list[str]:
    """Empty and repeated texts get names that no text contains by accident; the later of two keeps its text."""
    last = {token: i for i, token in enumerate(tokens)}
    if len(last) == len(tokens) and "" not in last:
        return list(tokens)
    return [token if token and last[token] == i else f"[UNUSED_{i}_{token}]" for i, token in enumerate(tokens)]


@dataclass(frozen=True)
class _Defaults:
    """What holds where the file does not say (llama.cpp)."""

    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    seperator: int | None = None
    padding: int | None = None


def tokenizer_from_gguf(
    metadata: Mapping[str, Any], *, source: str, chat_template: ChatTemplate | None = None
) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Args:
        metadata: the file's keys and values.
        source: the file's name, for messages.
        chat_template: one to use instead of the file's.

    Raises:
        TokenizerError: a key is missing or malformed, or the kind of vocabulary is unknown; names key and file.
    """
    model = metadata.get(_PREFIX + "model")
    if not isinstance(model, str) or model not in _LOADERS:
        known = ", ".join(_LOADERS)
        raise TokenizerError(f"{source}: {_PREFIX}model {model!r} is not supported (known: {known})")
    return _LOADERS[model](Vocabulary(metadata, source=source), chat_template or ChatTemplate.from_gguf(metadata))


def _special(vocabulary: Vocabulary, defaults: _Defaults, *, has_bos: bool = True) -> SpecialTokens:
    ids = {
        "bos": vocabulary.token_id("bos", defaults.bos) if has_bos else None,
        "eos": vocabulary.token_id("eos", defaults.eos),
        "unk": vocabulary.token_id("unknown", defaults.unknown),
        "sep": vocabulary.token_id("seperator", defaults.seperator),
        "pad": vocabulary.token_id("padding", defaults.padding),
        "mask": vocabulary.token_id("mask"),
        "cls": vocabulary.token_id("cls"),
    }
    return SpecialTokens(
        bos=ids["bos"],
        eos=ids["eos"],
        pad=ids["pad"],
        end_ids=_end_ids(vocabulary, ids["eos"]),
        all_ids=frozenset(vocabulary.of_type(PieceType.CONTROL, PieceType.UNKNOWN).values()),
        texts={f"{name}_token": vocabulary.tokens[i] for name, i in ids.items() if i is not None},
    )


def _end_ids(vocabulary: Vocabulary, eos: int | None) -> frozenset[int]:
    ends = {vocabulary.ids[marker] for marker in END_MARKERS & vocabulary.ids.keys()}
    # In the harmony format <|end|> only ends a message; <|return|> and <|call|> end the answer.
    if {"<|return|>", "<|call|>", "<|end|>"} <= vocabulary.ids.keys():
        ends.discard(vocabulary.ids["<|end|>"])
    ends |= {i for i in (eos, vocabulary.token_id("eot"), vocabulary.token_id("eom")) if i is not None}
    return frozenset(ends)


def _between(vocabulary: Vocabulary, special: SpecialTokens) -> list[int] | None:
    """Tokens between the texts of a pair, for a tokenizer that puts a token after texts (as llama.cpp's server has
    it for rerankers); None: nothing is put after texts."""
    if special.eos is None:
        return None
    separator = vocabulary.token_id("seperator") if vocabulary.flag("add_sep_token", False) else None
    return [special.eos] if separator is None else [special.eos, separator]


def _around(
    vocabulary: Vocabulary,
    *,
    before: int | None,
    after: int | None,
    between: Sequence[int] | None = None,
    second: int = 0,
) -> processors.PostProcessor | None:
    """A post-processor that puts a token before and after the text; None: neither.

    Args:
        between: tokens between the texts of a pair, if a token follows texts; None: that token.
        second: the segment of a pair's second text.
    """
    # The template's syntax has no escapes, so the tokens go by number.
    first, last = ([] if i is None else [f"t{i}"] for i in (before, after))
    if not first and not last:
        return None
    middle = [f"t{i}" for i in between] if between else last
    known = {i for i in (before, after, *(between or ())) if i is not None}
    special = [{"id": f"t{i}", "ids": [i], "tokens": [vocabulary.tokens[i]]} for i in known]
    single = [*first, "$A", *last]
    if not last:
        return processors.TemplateProcessing(single=single, special_tokens=special)
    pair = [*first, "$A", *middle, *(f"{each}:{second}" for each in ("$B", *last))]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _add_tokens(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in vocabulary.of_type(PieceType.USER_DEFINED)])
    special = vocabulary.of_type(PieceType.CONTROL, PieceType.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])


def _bpe(vocabulary: Vocabulary, chat_template: ChatTemplate | None) -> Tokenizer:
    pre = pre_tokenizer_named(vocabulary.text("pre"))
    return _merging(vocabulary, chat_template, pre, defaults=_Defaults(bos=11, eos=11))


def _gemma4(vocabulary: Vocabulary, chat_template: ChatTemplate | None) -> Tokenizer:
    return _merging(vocabulary, chat_template, pre_tokenizer_named("gemma4"), defaults=_Defaults())


def _merging(
    vocabulary: Vocabulary, chat_template: ChatTemplate | None, pre: PreTokenizer, *, defaults: _Defaults
) -> Tokenizer:
    """Byte-pair merging, of what the pre-tokenizer leaves."""
    special = _special(vocabulary, defaults, has_bos=pre.has_bos)
    of_bytes, merges = pre.merged == "bytes", vocabulary.merges()
    # Of a character that is in no word; llama.cpp leaves it out.
    unknown = vocabulary.token_id("unknown") if pre.merged == "words" else None
    if pre.as_gemma4:
        merges += _towards_runs_of_line_ends(vocabulary, merges)
    try:
        model = models.BPE(
            vocabulary.ids,
            merges,
            ignore_merges=pre.ignore_merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            byte_fallback=not of_bytes and vocabulary.has_byte_tokens(),
        )
    except Exception as error:  # the library raises plain Exception
        vocabulary.fail(f"merges: {error}")
    tokenizer = tokenizers.Tokenizer(model)
    lowercase = pre.merged == "words" and vocabulary.flag("normalizer.lowercase", False)
    tokenizer.normalizer = normalizers.Lowercase() if lowercase else pre.normalizer()
    tokenizer.pre_tokenizer = pre.pre_tokenizer()
    if of_bytes:
        tokenizer.decoder = decoders.ByteLevel()
    post = _around(
        vocabulary,
        before=special.bos if pre.as_gemma4 or vocabulary.flag("add_bos_token", pre.add_bos) else None,
        after=special.eos if vocabulary.flag("add_eos_token", False) else None,
        between=_between(vocabulary, special),
    )
    if post is not None:
        tokenizer.post_processor = post
    _add_tokens(tokenizer, vocabulary)
    pieces: dict[str, PieceDecoder] = {
        "bytes": ByteLevelPieces(),
        "characters": SpacePieces(),
        "words": SpacePieces(replace=()),
    }
    return Tokenizer(HuggingFaceBackend(tokenizer), pieces[pre.merged], special=special, chat_template=chat_template)


def _towards_runs_of_line_ends(vocabulary: Vocabulary, known: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merges that lead to tokens that are runs of line ends, where files lack them."""
    runs = sorted((text for text in vocabulary.ids if len(text) > 1 and not text.strip("\n")), key=len)
    splits = ((run[:i], run[i:]) for run in runs for i in range(1, len(run)))
    there = set(known)
    return [pair for pair in splits if pair not in there and vocabulary.ids.keys() >= set(pair)]


def _word_piece(vocabulary: Vocabulary, chat_template: ChatTemplate | None) -> Tokenizer:
    special = _special(vocabulary, _Defaults(bos=101, unknown=100, seperator=102, padding=0))
    names = [_word_piece_name(token, t) for token, t in zip(vocabulary.tokens, vocabulary.types.tolist(), strict=True)]
    if (unknown := vocabulary.token_id("unknown", 100)) is None:
        vocabulary.fail("unknown_token_id is missing or outside the vocabulary")
    pieces = {name: i for i, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token=names[unknown]))
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=vocabulary.flag("normalizer.strip_accents", lowercase)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    separator = vocabulary.token_id("seperator", 102)
    post = _around(
        vocabulary,
        before=special.bos if vocabulary.flag("add_bos_token", True) else None,
        after=separator if vocabulary.flag("add_sep_token", True) else None,
        second=1,
    )
    if post is not None:
        tokenizer.post_processor = post
    _add_tokens(tokenizer, vocabulary)
    return Tokenizer(HuggingFaceBackend(tokenizer), WordPieces(), special=special, chat_template=chat_template)


def _word_piece_name(token: str, kind: int) -> str:
    """The converter writes ▁word for a word's start and drops the ## of continuations."""
    if token.startswith(SPACE):
        return token[1:]
    if kind in (PieceType.CONTROL, PieceType.UNKNOWN) or (
        token.startswith("[") and token.endswith("]") and len(token) > 2
    ):
        return token
    return "##" + token


def _sentence_piece(vocabulary: Vocabulary, chat_template: ChatTemplate | None) -> Tokenizer:
    return _sentencepiece(
        vocabulary, chat_template, model_type=ModelType.BPE, defaults=_Defaults(bos=1, eos=2, unknown=0), add_bos=True
    )


def _unigram(vocabulary: Vocabulary, chat_template: ChatTemplate | None) -> Tokenizer:
    return _sentencepiece(
        vocabulary,
        chat_template,
        model_type=ModelType.UNIGRAM,
        defaults=_Defaults(eos=1, unknown=2, padding=0),
        add_bos=False,
    )


def _sentencepiece(
    vocabulary: Vocabulary,
    chat_template: ChatTemplate | None,
    *,
    model_type: ModelType,
    defaults: _Defaults,
    add_bos: bool,
) -> Tokenizer:
    unigram = model_type is ModelType.UNIGRAM
    if (unknown := vocabulary.token_id("unknown", defaults.unknown)) is not None:
        # The library wants exactly one unknown piece.
        vocabulary.types[vocabulary.types == PieceType.UNKNOWN] = PieceType.CONTROL
        vocabulary.types[unknown] = PieceType.UNKNOWN
    special = _special(vocabulary, defaults)
    add_space = vocabulary.flag("add_space_prefix", True)
    byte_fallback = vocabulary.has_byte_tokens()
    texts = list(vocabulary.tokens)
    for token, i in vocabulary.of_type(PieceType.USER_DEFINED).items():
        # The library matches user-defined pieces after it has written spaces as ▁.
        texts[i] = token.replace(" ", SPACE)
    serialized = proto.model(
        Pieces(_unique(texts), vocabulary.scores(), vocabulary.types),
        model_type=model_type,
        byte_fallback=byte_fallback,
        whitespace_as_suffix=False,
        normalizer_spec=proto.normalizer(
            add_dummy_prefix=add_space,
            remove_extra_whitespaces=vocabulary.flag("remove_extra_whitespaces", False),
            charsmap=vocabulary.charsmap(),
        ),
    )
    import sentencepiece  # most models have tokenizers of another kind

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(serialized)
    except (RuntimeError, ValueError) as error:
        vocabulary.fail(f"tokens, scores or precompiled_charsmap: {error}")
    rules = CutRules(
        special=vocabulary.of_type(PieceType.CONTROL, PieceType.UNKNOWN),
        literal=vocabulary.of_type(PieceType.USER_DEFINED),
        before=[special.bos] if vocabulary.flag("add_bos_token", add_bos) and special.bos is not None else [],
        after=[special.eos] if vocabulary.flag("add_eos_token", unigram) and special.eos is not None else [],
        between=_between(vocabulary, special) if unigram else None,
    )
    return Tokenizer(
        SentencePieceBackend(processor, rules),
        SpacePieces(strip_first=int(add_space)),
        special=special,
        chat_template=chat_template,
    )


_LOADERS: dict[Any, Callable[[Vocabulary, ChatTemplate | None], Tokenizer]] = {
    "gpt2": _bpe,
    "whitespace": _bpe,
    "gemma4": _gemma4,
    "llama": _sentence_piece,
    "bert": _word_piece,
    "t5": _unigram,
}
