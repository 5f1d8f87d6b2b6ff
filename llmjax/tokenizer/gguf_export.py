"""A Hugging Face tokenizer as the ``tokenizer.*`` keys of a GGUF file, if the keys can say what it does.

GGUF names one of a list of pre-tokenizers instead of describing it, and keeps scores instead of SentencePiece's
merges. Whether that loses anything is not guessed: the keys are read back, and both tokenizers must agree on texts
that tokenizers disagree about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from llmjax.checkpoint.files import read_object
from llmjax.errors import TokenizerError
from llmjax.tokenizer.gguf import tokenizer_from_gguf
from llmjax.tokenizer.huggingface import TokenizerConfig, tokenizer_from_folder
from llmjax.tokenizer.pieces import SPACE
from llmjax.tokenizer.pretokenizers import PRE_TOKENIZERS
from llmjax.tokenizer.sentencepiece_proto import PieceType, pieces_of
from llmjax.tokenizer.tokenizer import Tokenizer

CHECK_TEXTS = (
    "Hello, world! It's 3.14 o'clock; WE'LL see: don't  they?",
    " leading and trailing ",
    "tabs\tand\n\nlines\r\n  indented\n   \n\nend   ",
    "1234567890 12345 1 22 333 4444 ٣٤٥ ²³ ½",
    "naïve café ﬁne ÅÅ Ａ e\u0301 ά ἄ ç",
    "日本語のテキスト、中文字符。 한국어 ไทย हिन्दी العربية עברית",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 ❤️ \u200b\u00a0\u3000 end",
    "def f(x):\n    return {'a': x[0] == 1, \"b\": x != None}  # comment\n",
    "https://example.com/a?b=c&d=%20#e user@mail.org C:\\path\\file.txt",
    "CamelCaseWords snake_case_words kebab-case ALLCAPS mIxEd iPhone's HTTPServer",
    "$100.00 €5 50% @home #tag <b>bold</b> (a) [b] {c} ~`^|*+=_-",
    "a" * 40 + " " * 17 + "!" * 9 + "\n" * 5,
    "\u0000\u0001\ufffd \U0001f600\U000e0041",
    "",
    "x",
)
"""Texts on which tokenizers are compared."""
CHECK_TOKENS = 64  # how many of the tokens that are never cut are tried in a sentence

# Names that llama.cpp's converter prefers among those that mean the same.
_PREFERRED = ("llama-bpe", "qwen2", "smollm", "gpt-2", "tekken", "gpt-4o", "deepseek-v3", "deepseek-llm", "glm4")
_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # spelled as in the format


def tokenizer_metadata(folder: Path, *, vocab_size: int) -> dict[str, Any]:
    """The ``tokenizer.*`` keys for the tokenizer in a folder, its chat templates included.

    Args:
        folder: as on Hugging Face.
        vocab_size: rows of the embedding; ids without a token get names of their own.

    Raises:
        TokenizerError: there is no tokenizer, or GGUF cannot hold it; names the file, and the text that would get
            other ids.
    """
    config = TokenizerConfig.read(folder)
    original = tokenizer_from_folder(folder)
    templates = dict(original.chat_template.sources) if original.chat_template is not None else {}
    if (path := folder / "tokenizer.model").exists():
        candidates = _sentencepiece_model(path, config, vocab_size)
    elif (path := folder / "tokenizer.json").exists():
        content = read_object(path, error=TokenizerError)
        candidates = _tokenizer_json(content, path, vocab_size)
    else:
        raise TokenizerError(f"{folder}: only tokenizer.json and tokenizer.model can be written as GGUF")
    problem = "no pre-tokenizer that GGUF names cuts text as this one does"
    for candidate in candidates:
        keys = candidate | _switches(original) | _special_ids(original, config)
        metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        whole = np.flatnonzero(np.isin(keys["token_type"], (PieceType.CONTROL, PieceType.USER_DEFINED)))
        tokens = [keys["tokens"][i] for i in whole[:CHECK_TOKENS]]
        text = first_difference(original, tokenizer_from_gguf(metadata, source=str(path)), tokens)
        if text is None:
            return metadata | _template_keys(templates)
        problem = f"text {text[:60]!r} would get other ids"
    raise TokenizerError(f"{path}: cannot be written as GGUF: {problem}")


def _template_keys(sources: Mapping[str, str]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    return {prefix if name == "default" else f"{prefix}.{name}": source for name, source in sources.items()}


def _switches(original: Tokenizer) -> dict[str, bool]:
    """What stands around a text."""
    around = original.encode("")
    first, last = around[:1], around[-1:]
    return {
        "add_bos_token": first == [original.bos_token_id],
        "add_eos_token": last == [original.eos_token_id] and (len(around) > 1 or first != [original.bos_token_id]),
    }


def _special_ids(original: Tokenizer, config: TokenizerConfig) -> dict[str, int]:
    ids = {name: _id_of(original, text) for name, text in config.tokens.items()}
    return {f"{_KEYS.get(name, name)}_token_id": i for name, i in ids.items() if i is not None}


def _id_of(tokenizer: Tokenizer, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def first_difference(original: Tokenizer, exported: Tokenizer, tokens: Iterable[str]) -> str | None:
    """The first text on which two tokenizers disagree: CHECK_TEXTS, and sentences with `tokens` that are never cut."""
    for text in (*CHECK_TEXTS, *(f"a{token} b{token}c" for token in tokens)):
        for special in (True, False):
            if original.encode(text, add_special_tokens=special) != exported.encode(text, add_special_tokens=special):
                return text
    return None


def _vocabulary(known: Iterable[tuple[int, str, PieceType]], vocab_size: int, path: Path) -> dict[str, Any]:
    """Tokens and types by id; later entries replace earlier ones, and gaps are filled."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = np.full(vocab_size, PieceType.UNUSED, np.int32)
    for token_id, text, kind in known:
        if token_id >= vocab_size:
            raise TokenizerError(f"{path}: token {text!r} is {token_id}, beyond the embedding's {vocab_size} rows")
        tokens[token_id], types[token_id] = text, kind
    return {"tokens": tokens, "token_type": types}


def _tokenizer_json(content: Mapping[str, Any], path: Path, vocab_size: int) -> Iterable[dict[str, Any]]:
    model = content.get("model") or {}
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"{path}: a vocabulary of type {model.get('type')!r} cannot be written as GGUF")
    added = [
        (entry["id"], entry["content"], PieceType.CONTROL if entry["special"] else PieceType.USER_DEFINED)
        for entry in content.get("added_tokens") or []
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        yield from _merges_as_scores(model["vocab"], merges, added, vocab_size=vocab_size, path=path)
        return
    plain = [(i, text, PieceType.NORMAL) for text, i in model["vocab"].items()]
    vocabulary = _vocabulary([*plain, *added], vocab_size, path)
    for name in _pre_tokenizers(tokenizers.Tokenizer.from_file(str(path)), bool(model.get("ignore_merges"))):
        yield {"model": "gpt2", "pre": name, **vocabulary, "merges": merges}


def _pre_tokenizers(pipeline: tokenizers.Tokenizer, ignore_merges: bool) -> list[str]:
    """Names of pre-tokenizers that cut the texts as this one does, those that converters write first."""

    def cut(normalizer: Any, pre_tokenizer: Any) -> list[Any]:
        texts = [text if normalizer is None else normalizer.normalize_str(text) for text in CHECK_TEXTS]
        return [[piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]

    if pipeline.pre_tokenizer is None:
        return []
    wanted = cut(pipeline.normalizer, pipeline.pre_tokenizer)
    names = dict.fromkeys((*_PREFERRED, *PRE_TOKENIZERS))
    candidates = {}
    for name in names:
        pre = PRE_TOKENIZERS[name]
        if pre not in candidates and pre.merged == "bytes" and pre.ignore_merges == ignore_merges:
            candidates[pre] = cut(pre.normalizer(), pre.pre_tokenizer()) == wanted
    return [name for name in names if candidates.get(PRE_TOKENIZERS[name])][:1]


def _merges_as_scores(
    vocab: Mapping[str, int],
    merges: list[str],
    added: list[tuple[int, str, PieceType]],
    *,
    vocab_size: int,
    path: Path,
) -> Iterable[dict[str, Any]]:
    """SentencePiece's own BPE: of two neighbors those that make the piece of the highest score merge first."""
    rank = {merge.replace(" ", "", 1): i for i, merge in reversed(list(enumerate(merges)))}
    pieces = [(i, text, _piece_type(text)) for text, i in vocab.items()]
    unknown = [(i, text, PieceType.UNKNOWN) for text, i in vocab.items() if text == "<unk>"]
    vocabulary = _vocabulary([*pieces, *added, *unknown], vocab_size, path)
    scores = np.array([-rank.get(token, len(merges)) for token in vocabulary["tokens"]], np.float32)
    for prefix in (False, True):
        yield {"model": "llama", "pre": "default", **vocabulary, "scores": scores, "add_space_prefix": prefix}


def _piece_type(text: str) -> PieceType:
    return PieceType.BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else PieceType.NORMAL


def _sentencepiece_model(path: Path, config: TokenizerConfig, vocab_size: int) -> Iterable[dict[str, Any]]:
    """Pieces, scores and types as the model has them, with the tokens that were added later."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = pieces_of(processor.serialized_model_proto())
    size = len(pieces.texts)
    pieces_known = [
        (i, text, PieceType(kind)) for i, (text, kind) in enumerate(zip(pieces.texts, pieces.types, strict=True))
    ]
    added = [
        (i, token.content, PieceType.CONTROL if token.special else PieceType.USER_DEFINED)
        for i, token in config.added.items()
        if i >= size or pieces_known[i][2] is not PieceType.UNKNOWN
    ]
    vocabulary = _vocabulary([*pieces_known, *added], vocab_size, path)
    scores = np.full(vocab_size, -1e4, np.float32)
    scores[:size] = pieces.scores
    prefix = processor.normalize("a").startswith(SPACE)
    yield {"model": "llama", "pre": "default", **vocabulary, "scores": scores, "add_space_prefix": prefix}
