"""tekken.json: the ids of tiktoken's algorithm, written down here in its plainest form."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from llmjax.errors import TokenizerError
from llmjax.tokenizer import load_tokenizer
from llmjax.tokenizer.pieces import byte_level_alphabet

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


def plain_bpe(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    parts = [bytes([byte]) for byte in piece]
    while True:
        joins = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not joins:
            return [ranks[part] for part in parts]
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def tekken(golden: Callable[[str], Any]) -> dict[str, Any]:
    alphabet = byte_level_alphabet()
    tokens = [bytes(alphabet[c] for c in token) for token in golden("byte_bpe")["vocabulary"]["tokens"][3:]]
    tokens.sort(key=lambda token: len(token) > 1)
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(SPECIAL)]
    config = {"pattern": PATTERN, "default_vocab_size": len(tokens), "default_num_special_tokens": 8, "version": "v7"}
    return {"config": config, "vocab": vocab, "special_tokens": special}


def test_ids(tmp_path: Path, golden: Callable[[str], Any], corpus: list[str]) -> None:
    data = tekken(golden)
    (tmp_path / "tekken.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer(tmp_path)
    # The vocabulary is cut to make room for the special tokens.
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in data["vocab"][:-8]}
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    for text in corpus:
        pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
        if "</s>" in text or "[INST]" in text:
            continue
        expected: list[int] = []
        for piece in pieces:
            raw = piece.encode()
            expected += [ranks[raw]] if raw in ranks else plain_bpe(raw, ranks) if len(raw) < 500 else []
        ids = tokenizer.encode(text)
        if all(len(piece) < 100 for piece in pieces):
            assert ids == [1, *(rank + 8 for rank in expected)], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]a</s>", add_special_tokens=False) == [3, ranks[b"a"] + 8, 2]
    assert tokenizer.id_to_token(7) == "<SPECIAL_7>" and tokenizer.vocab_size == len(data["vocab"])
    assert tokenizer.eos_token_ids == {2} and tokenizer.all_special_ids == set(range(8))


def test_files_of_nemos_time_name_no_special_tokens(tmp_path: Path, golden: Callable[[str], Any]) -> None:
    data = tekken(golden)
    data["config"] |= {"default_num_special_tokens": 30, "version": "v3"}
    for special in ({}, {"special_tokens": None}):
        named = {key: value for key, value in data.items() if key != "special_tokens"} | special
        (tmp_path / "tekken.json").write_text(json.dumps(named))
        tokenizer = load_tokenizer(tmp_path)
        assert [tokenizer.id_to_token(i) for i in range(24)] == golden("tekken")
        assert tokenizer.encode("[INST]a</s>")[:2] == [1, 3] and tokenizer.encode("</s>")[-1] == 2
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 11)
        assert tokenizer.all_special_ids == set(range(30))
    for version in ("v11", "v13", None):
        data["config"]["version"] = version
        (tmp_path / "tekken.json").write_text(json.dumps({k: v for k, v in data.items() if k != "special_tokens"}))
        with pytest.raises(TokenizerError, match="special_tokens is missing"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("key", ["config", "vocab", "special_tokens"])
def test_malformed(tmp_path: Path, golden: Callable[[str], Any], key: str) -> None:
    data = tekken(golden)
    for broken in ({k: v for k, v in data.items() if k != key}, {**data, key: [1]}):
        (tmp_path / "tekken.json").write_text(json.dumps(broken))
        with pytest.raises(TokenizerError, match=r"tekken\.json"):
            load_tokenizer(tmp_path)
