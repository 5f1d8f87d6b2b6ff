"""Tokenizers out of folders laid out as on Hugging Face.

Which file wins, and what the older ones mean: transformers, ``tokenization_utils_base.py`` and
``convert_slow_tokenizer.py``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from llmjax.checkpoint.files import object_if_there
from llmjax.errors import TokenizerError
from llmjax.tokenizer import sentencepiece_proto as proto
from llmjax.tokenizer.backend import CutRules, HuggingFaceBackend, SentencePieceBackend
from llmjax.tokenizer.chat_template import ChatTemplate
from llmjax.tokenizer.pieces import SPACE, SpacePieces, decoder_of
from llmjax.tokenizer.pretokenizers import pre_tokenizer_named
from llmjax.tokenizer.ranks import RANK_FILES, is_rank_file, pipeline_of_ranks
from llmjax.tokenizer.tekken import tokenizer_from_tekken
from llmjax.tokenizer.tokenizer import SpecialTokens, Tokenizer

SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
_NAMES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")

# Classes whose add_bos_token and add_eos_token rule over the post-processor in tokenizer.json.
_LLAMA_LIKE = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"})
# Classes whose SentencePiece model is all there is to them, and whether they put BOS in front by default.
_SENTENCEPIECE_CLASSES = {
    "": True, "LlamaTokenizer": True, "CodeLlamaTokenizer": True, "GemmaTokenizer": True, "InternLMTokenizer": True,
    "InternLM2Tokenizer": True, "YiTokenizer": True, "BaichuanTokenizer": False, "ChatGLMTokenizer": False,
    "SiglipTokenizer": False,
}  # fmt: skip
# Classes that put EOS after a text by default, and read it in lower case and without punctuation.
_CANONICAL = frozenset({"SiglipTokenizer"})
# Some of them have tokens after the model's, whatever tokenizer_config.json says, and put some of them in front.
_AFTER_SENTENCEPIECE = {
    "ChatGLMTokenizer": (
        "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    ),
}  # fmt: skip
_BEFORE_SENTENCEPIECE = {"ChatGLMTokenizer": ("[gMASK]", "sop")}
# Classes over vocab.json and merges.txt: their pre-tokenizer.
_BPE_CLASSES = {
    "": "gpt-2", "GPT2Tokenizer": "gpt-2", "CodeGenTokenizer": "gpt-2", "RobertaTokenizer": "gpt-2",
    "BartTokenizer": "gpt-2", "GPTNeoXTokenizer": "olmo", "Qwen2Tokenizer": "qwen2",
}  # fmt: skip


@dataclass(frozen=True)
class TokenizerConfig:
    """tokenizer_config.json with what older files keep beside it.

    Args:
        values: the JSON object.
        tokens: ``bos``, ``eos`` … to token text.
        added: tokens beyond the vocabulary by id.
    """

    values: Mapping[str, Any]
    tokens: Mapping[str, str]
    added: Mapping[int, AddedToken]

    @property
    def tokenizer_class(self) -> str:
        return str(self.values.get("tokenizer_class") or "").removesuffix("Fast")

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)

    @staticmethod
    def read(folder: Path) -> TokenizerConfig:
        values = object_if_there(folder / "tokenizer_config.json", error=TokenizerError)
        older = object_if_there(folder / "special_tokens_map.json", error=TokenizerError)
        texts = {name: _text(values.get(f"{name}_token")) or _text(older.get(f"{name}_token")) for name in _NAMES}
        added: dict[int, AddedToken] = {}
        for token_id, entry in (values.get("added_tokens_decoder") or {}).items():
            flags = {k: bool(entry.get(k)) for k in ("lstrip", "rstrip", "single_word", "normalized", "special")}
            added[int(token_id)] = AddedToken(entry["content"], **flags)
        if not added:
            special = {text for text in texts.values() if text}
            for text, token_id in object_if_there(folder / "added_tokens.json", error=TokenizerError).items():
                added[int(token_id)] = AddedToken(text, normalized=False, special=text in special)
        return TokenizerConfig(
            values, {name: text for name, text in texts.items() if text}, dict(sorted(added.items()))
        )

    def special(self, tokenizer_ids: Mapping[str, int | None], all_ids: Iterable[int]) -> SpecialTokens:
        """The special tokens, given the ids of ``tokens``."""
        eos = tokenizer_ids.get("eos")
        return SpecialTokens(
            bos=tokenizer_ids.get("bos"),
            eos=eos,
            pad=tokenizer_ids.get("pad"),
            end_ids=frozenset() if eos is None else frozenset({eos}),
            all_ids=frozenset(all_ids),
            texts={f"{name}_token": text for name, text in self.tokens.items()},
        )


def _text(value: Any) -> str | None:
    """A token given as a string or as an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def tokenizer_from_folder(folder: Path, *, chat_template: ChatTemplate | None = None) -> Tokenizer:
    """The tokenizer in a folder.

    Raises:
        TokenizerError: there is none, or a file is malformed or of an unknown kind; names the file.
    """
    try:
        config = TokenizerConfig.read(folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: malformed ({type(error).__name__}: {error})"
        ) from error
    template = chat_template or ChatTemplate.from_folder(folder, config.values)
    if (folder / "tokenizer.json").exists():
        return _wrap(
            _pipeline_of_file(folder / "tokenizer.json", config), config, template, source=folder / "tokenizer.json"
        )
    for name in (*SENTENCEPIECE_FILES, *RANK_FILES):
        if _holds_ranks(folder / name):
            pipeline = pipeline_of_ranks(folder / name, config.tokenizer_class, config.added)
            return _wrap(pipeline, config, template, source=folder / name)
        if (folder / name).exists():
            return _sentencepiece(folder / name, config, template)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return _wrap(_byte_bpe(folder, config), config, template, source=folder / "vocab.json")
    if (folder / "vocab.txt").exists():
        return _wrap(_word_piece(folder / "vocab.txt", config), config, template, source=folder / "vocab.txt")
    if (folder / "tekken.json").exists():
        return tokenizer_from_tekken(folder / "tekken.json", chat_template=template)
    names = ", ".join(
        ("tokenizer.json", *SENTENCEPIECE_FILES, *RANK_FILES, "vocab.json with merges.txt", "vocab.txt", "tekken.json")
    )
    raise TokenizerError(f"{folder}: no tokenizer found (looked for {names})")


def _holds_ranks(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return is_rank_file(file.read(4096))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TokenizerError(f"{path}: {error}") from error


def _wrap(
    pipeline: tokenizers.Tokenizer, config: TokenizerConfig, template: ChatTemplate | None, *, source: Path
) -> Tokenizer:
    there = {token.content for token in pipeline.get_added_tokens_decoder().values()}
    # At once, in the order of their ids: the library makes its matcher anew at each call.
    pipeline.add_tokens([token for token in config.added.values() if token.content not in there])
    for token_id, token in config.added.items():
        if pipeline.token_to_id(token.content) != token_id:
            raise TokenizerError(
                f"{source.parent / 'tokenizer_config.json'}: token {token.content!r} is declared as {token_id}, but is "
                f"{pipeline.token_to_id(token.content)} in {source.name}"
            )
    ids = {name: pipeline.token_to_id(text) for name, text in config.tokens.items()}
    special_ids = [i for i, token in pipeline.get_added_tokens_decoder().items() if token.special]
    return Tokenizer(
        HuggingFaceBackend(pipeline),
        decoder_of(pipeline, source=str(source)),
        special=config.special(ids, special_ids),
        chat_template=template,
    )


def _pipeline_of_file(path: Path, config: TokenizerConfig) -> tokenizers.Tokenizer:
    try:
        pipeline = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: {' '.join(str(error).split())}") from error
    if config.tokenizer_class in _CANONICAL:
        spaces = [normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Strip()]
        marks = normalizers.Replace(tokenizers.Regex(f"[{re.escape(string.punctuation)}]"), "")
        own = [] if pipeline.normalizer is None else [pipeline.normalizer]
        pipeline.normalizer = normalizers.Sequence([normalizers.Lowercase(), marks, *spaces, *own])
    rules = any(isinstance(config.values.get(key), bool) for key in ("add_bos_token", "add_eos_token"))
    if config.tokenizer_class in _LLAMA_LIKE and rules:
        _surround(
            pipeline, config, add_bos=config.flag("add_bos_token", True), add_eos=config.flag("add_eos_token", False)
        )
    return pipeline


def _surround(pipeline: tokenizers.Tokenizer, config: TokenizerConfig, *, add_bos: bool, add_eos: bool) -> None:
    """Put BOS and EOS around every text, whatever the post-processor said."""
    names = [name for name, wanted in (("bos", add_bos), ("eos", add_eos)) if wanted and name in config.tokens]
    special = []
    for name in names:
        text = config.tokens[name]
        if (token_id := pipeline.token_to_id(text)) is None:
            raise TokenizerError(f"tokenizer_config.json: {name}_token {text!r} is not in the vocabulary")
        special.append({"id": name, "ids": [token_id], "tokens": [text]})
    single = [*(n for n in names if n == "bos"), "$A", *(n for n in names if n == "eos")]
    pipeline.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _add_named_tokens(pipeline: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    pipeline.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in config.tokens.values()])


def _byte_bpe(folder: Path, config: TokenizerConfig) -> tokenizers.Tokenizer:
    kind = config.tokenizer_class
    if kind not in _BPE_CLASSES:
        raise TokenizerError(
            f"{folder}: tokenizer_class {kind!r} with vocab.json is not supported; it needs a tokenizer.json"
        )
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{folder / 'vocab.json'} with merges.txt: {' '.join(str(error).split())}") from error
    pipeline = tokenizers.Tokenizer(model)
    pre = pre_tokenizer_named(_BPE_CLASSES[kind])
    pipeline.normalizer = pre.normalizer()
    pipeline.pre_tokenizer = pre.pre_tokenizer()
    if config.flag("add_prefix_space", False):
        pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pipeline.decoder = decoders.ByteLevel()
    _add_named_tokens(pipeline, config)
    if kind in ("RobertaTokenizer", "BartTokenizer"):
        _surround(pipeline, config, add_bos=True, add_eos=True)
    elif config.flag("add_bos_token", False):
        _surround(pipeline, config, add_bos=True, add_eos=False)
    return pipeline


def _word_piece(path: Path, config: TokenizerConfig) -> tokenizers.Tokenizer:
    try:
        words = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    defaults = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    named = {**defaults, **config.tokens}
    vocabulary = {word: i for i, word in enumerate(words)}
    if missing := [named[name] for name in ("unk", "cls", "sep") if named[name] not in vocabulary]:
        raise TokenizerError(f"{path}: has no {missing[0]}")
    pipeline = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=named["unk"]))
    pipeline.normalizer = normalizers.BertNormalizer(
        lowercase=config.flag("do_lower_case", True),
        strip_accents=config.values.get("strip_accents"),
        handle_chinese_chars=config.flag("tokenize_chinese_chars", True),
    )
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece()
    present = [named[name] for name in defaults if named[name] in vocabulary]
    pipeline.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in present])
    ends = [{"id": n, "ids": [vocabulary[named[n]]], "tokens": [named[n]]} for n in ("cls", "sep")]
    pipeline.post_processor = processors.TemplateProcessing(
        single=["cls", "$A", "sep"], pair=["cls", "$A", "sep", "$B:1", "sep:1"], special_tokens=ends
    )
    return pipeline


def _sentencepiece(path: Path, config: TokenizerConfig, template: ChatTemplate | None) -> Tokenizer:
    if config.tokenizer_class not in _SENTENCEPIECE_CLASSES:
        raise TokenizerError(
            f"{path}: tokenizer_class {config.tokenizer_class!r} is not supported; it needs a tokenizer.json"
        )
    processor = _load_model(path)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    behind = enumerate(_AFTER_SENTENCEPIECE.get(config.tokenizer_class, ()), start=len(pieces))
    own = {i: AddedToken(text, normalized=False, special=True) for i, text in behind}
    config = TokenizerConfig(config.values, config.tokens, dict(sorted({**own, **config.added}.items())))
    special = {piece: i for i, piece in enumerate(pieces) if processor.is_control(i) or processor.is_unknown(i)}
    special |= {token.content: i for i, token in config.added.items() if token.special}
    known = {piece: i for i, piece in enumerate(pieces)} | {token.content: i for i, token in config.added.items()}
    texts = {name: pieces[i] for name, i in (("bos", processor.bos_id()), ("eos", processor.eos_id())) if i >= 0}
    config = TokenizerConfig(config.values, texts | dict(config.tokens), config.added)
    ids = {name: known.get(text) for name, text in config.tokens.items()}
    special |= {text: i for name, text in config.tokens.items() if (i := ids[name]) is not None}

    def wanted(name: str, default: bool) -> list[int]:
        token_id = ids.get(name)
        return [token_id] if config.flag(f"add_{name}_token", default) and token_id is not None else []

    rules = CutRules(
        special=special,
        literal={token.content: i for i, token in config.added.items() if token.content not in special},
        before=[
            *wanted("bos", _SENTENCEPIECE_CLASSES[config.tokenizer_class]),
            *(known[text] for text in _BEFORE_SENTENCEPIECE.get(config.tokenizer_class, ())),
        ],
        after=wanted("eos", config.tokenizer_class in _CANONICAL),
        added={token.content: i for i, token in config.added.items() if i >= len(pieces) or pieces[i] != token.content},
        rewritten=_canonical if config.tokenizer_class in _CANONICAL else None,
    )
    prefixed = processor.normalize("a").startswith(SPACE)
    inner = None
    if prefixed and not config.flag("legacy", True):
        # Only the start of a text gets a space then, not what follows a special token.
        override = proto.normalizer(add_dummy_prefix=False)
        inner = type(processor)(model_proto=processor.serialized_model_proto() + override)
    return Tokenizer(
        SentencePieceBackend(processor, rules, inner=inner),
        SpacePieces(strip_first=int(prefixed)),
        special=config.special(ids, special.values()),
        chat_template=template,
    )


def _canonical(text: str) -> str:
    """A text as SigLIP has learned texts; formula: transformers' SiglipTokenizer.canonicalize_text."""
    return " ".join(text.lower().translate(dict.fromkeys(map(ord, string.punctuation))).split())


def _load_model(path: Path) -> Any:
    import sentencepiece  # most models have tokenizers of another kind

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except (OSError, RuntimeError, ValueError) as error:
        raise TokenizerError(f"{path}: {' '.join(str(error).split())}") from error
