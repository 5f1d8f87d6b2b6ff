"""Files of tiktoken's ranks: the ids of its algorithm, between what the classes of tokenizers add."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from llmjax.errors import TokenizerError
from llmjax.tokenizer import load_tokenizer
from llmjax.tokenizer.pieces import byte_level_alphabet
from llmjax.tokenizer.pretokenizers import pre_tokenizer_named
from tests.tokenizer.test_tekken import plain_bpe

GLM4 = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>")


@pytest.fixture
def ranks(golden: Callable[[str], Any]) -> dict[bytes, int]:
    alphabet = byte_level_alphabet()
    tokens = [bytes(alphabet[c] for c in token) for token in golden("byte_bpe")["vocabulary"]["tokens"][3:]]
    tokens.sort(key=lambda token: len(token) > 1)
    return {token: rank for rank, token in enumerate(tokens)}


def write(folder: Path, name: str, ranks: dict[bytes, int], config: dict[str, Any]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / name).write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def added(ranks: dict[bytes, int], *texts: str) -> dict[str, Any]:
    return {str(len(ranks) + i): {"content": text, "special": True} for i, text in enumerate(texts)}


def expected(text: str, ranks: dict[bytes, int], pre: str) -> list[int]:
    (pattern,) = pre_tokenizer_named(pre).patterns
    found: list[int] = []
    for piece, _ in pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text):
        raw = piece.encode()
        found += [ranks[raw]] if raw in ranks else plain_bpe(raw, ranks)
    return found


def short(corpus: list[str]) -> list[str]:
    texts = [text for text in corpus if len(text) < 400 and "<" not in text and "[" not in text]
    assert len(texts) > 10
    return texts


def test_glm4(tmp_path: Path, ranks: dict[bytes, int], corpus: list[str]) -> None:
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    write(tmp_path, "tokenizer.model", ranks, config | {"added_tokens_decoder": added(ranks, *GLM4)})
    tokenizer, first = load_tokenizer(tmp_path), len(ranks)
    before = [first + 2, first + 4]
    for text in short(corpus):
        ids = tokenizer.encode(text)
        assert ids == before + expected(text, ranks, "glm4"), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|user|>\nhi", add_special_tokens=False)[0] == first + 7
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == first


def test_kimi(tmp_path: Path, ranks: dict[bytes, int], corpus: list[str]) -> None:
    config = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    write(tmp_path, "tiktoken.model", ranks, config | {"added_tokens_decoder": added(ranks, "[BOS]", "[EOS]")})
    tokenizer, first = load_tokenizer(tmp_path), len(ranks)
    for text in short(corpus):
        assert tokenizer.encode(text) == expected(text, ranks, "kimi-k2"), text
    assert tokenizer.encode(f"a[EOS]<|reserved_token_{first + 5}|>")[1:] == [first + 1, first + 5]
    assert tokenizer.vocab_size == first + 256


def test_pieces_of_kimi() -> None:
    """Chinese characters stand by themselves."""
    (pattern,) = pre_tokenizer_named("kimi-k2").patterns
    text = "HelloWorld's 你好world世界ABCdef  12345 が々ー漢字x!!\n\n  Übergröße's"
    found = [piece for piece, _ in pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)]
    # What Python's regex finds, which knows intersections of classes too.
    assert found == [
        *("Hello", "World's", " ", "你好", "world", "世界", "ABCdef", " ", " ", "123", "45", " が", "々", "ー", "漢字"),
        *("x", "!!\n\n", " ", " Übergröße's"),
    ]


def test_qwen(tmp_path: Path, ranks: dict[bytes, int], corpus: list[str]) -> None:
    write(tmp_path, "qwen.tiktoken", ranks, {"tokenizer_class": "QWenTokenizer"})
    tokenizer, first = load_tokenizer(tmp_path), len(ranks)
    for text in short(corpus):
        assert tokenizer.encode(text) == expected(unicodedata.normalize("NFC", text), ranks, "qwen2"), text
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert tokenizer.encode("<|im_start|>a<|extra_204|>") == [first + 1, ranks[b"a"], first + 207]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_class": "OtherTokenizer"}, "'OtherTokenizer' is not one of ChatGLM4Tokenizer"),
        ({"added_tokens_decoder": {"5": {"content": "<x>"}}}, "token 5 of tokenizer_config.json does"),
        (
            {"added_tokens_decoder": {"90000": {"content": "<x>"}}},
            "token 90000 of tokenizer_config.json does",
        ),
        ({"added_tokens_decoder": {}}, r"\[gMASK\] is not among the added tokens"),
    ],
)
def test_refused(tmp_path: Path, ranks: dict[bytes, int], change: dict[str, Any], message: str) -> None:
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added(ranks, *GLM4)}
    write(tmp_path, "tokenizer.model", ranks, config | change)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("lines", ["YQ== 0\n", "YQ== 0\nYg== x\n", "YQ== 0\n!!! 1\n", "YQ== 0\nYg==\n"])
def test_malformed(tmp_path: Path, lines: str) -> None:
    (tmp_path / "tokenizer.model").write_text(lines)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ChatGLM4Tokenizer"}')
    with pytest.raises(TokenizerError, match="malformed") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
