"""Tokenizers of GGUF files written as folders: read back, they give the same ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmjax.errors import TokenizerError
from llmjax.tokenizer import Tokenizer, load_tokenizer
from llmjax.tokenizer.folder_export import write_tokenizer
from llmjax.tokenizer.gguf import tokenizer_from_gguf

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_like(**keys: object) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "▁a", "ab", "<turn>", "<mask>"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 3, 4]
    scores = np.array([0.0] * 259 + [-5, -6, -7, -1, -2, 0, 0], np.float32)
    metadata = {
        "model": "llama", "tokens": tokens, "token_type": np.array(types, np.int32), "scores": scores,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **keys,
    }  # fmt: skip
    keyed = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return tokenizer_from_gguf(
        keyed | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}, source="x"
    )


@pytest.mark.parametrize("keys", [{}, {"add_bos_token": False, "add_eos_token": True}, {"add_space_prefix": False}])
def test_sentencepiece(keys: dict[str, bool], tmp_path: Path) -> None:
    original = sentencepiece_like(**keys)
    write_tokenizer(original, tmp_path)
    found = load_tokenizer(tmp_path)
    for text in ("ab a b", "", " é", "a<turn>b<mask> <s>a"):
        assert found.encode(text) == original.encode(text)
        assert found.decode(found.encode(text)) == original.decode(original.encode(text))
    assert (found.bos_token_id, found.eos_token_id) == (1, 2)
    messages = [{"role": "user", "content": "ab"}]
    assert found.apply_chat_template(messages) == "<s>ab"


@pytest.mark.real_model
def test_byte_pairs_of_a_real_model(smollm2_path: Path, tmp_path: Path) -> None:
    original = load_tokenizer(smollm2_path)
    write_tokenizer(original, tmp_path)
    found = load_tokenizer(tmp_path)
    text = "Grüße, it's 3.14!  <|im_start|>user\n\n\tx = [1,2]\n"
    assert found.encode(text) == original.encode(text)
    assert found.eos_token_id == original.eos_token_id and found.all_special_ids == original.all_special_ids
    messages = [{"role": "user", "content": "Hi"}]
    assert found.apply_chat_template(messages) == original.apply_chat_template(messages)


def test_a_tokenizer_of_another_kind(tmp_path: Path) -> None:
    original = sentencepiece_like()
    original.backend = object()  # type: ignore[assignment]
    with pytest.raises(TokenizerError, match="of kind object cannot be written"):
        write_tokenizer(original, tmp_path)
