"""Prompts with a gap are those that models were trained with, as their makers write them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from llmjax.errors import InvalidRequest, PromptTooLong
from llmjax.serve.prompts import completion_prompts
from llmjax.tokenizer import Tokenizer, load_tokenizer
from llmjax.tokenizer.gguf import tokenizer_from_gguf
from llmjax.tokenizer.infill import InfillTokens, encode_suffix

CONTROL = 3  # a kind of token in GGUF


def sentence_pieces(golden: Callable[[str], Any], gguf_keys: Callable[..., Any], *more: str) -> Tokenizer:
    vocabulary = dict(golden("spm")["vocabulary"])
    vocabulary["tokens"] = [*vocabulary["tokens"], *more]
    vocabulary["scores"] = [*vocabulary["scores"], *[0.0] * len(more)]
    vocabulary["token_type"] = [*vocabulary["token_type"], *[CONTROL] * len(more)]
    return tokenizer_from_gguf(gguf_keys(vocabulary), source="test")


def byte_level(folder: Path, *more: str) -> Tokenizer:
    bytes_ = {character: id for id, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=bytes_, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in more])
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(tokenizer.id_to_token(id) for id in ids)


def test_mistral_puts_the_text_before_the_gap_last(golden: Callable[[str], Any], gguf_keys: Callable[..., Any]) -> None:
    tokenizer = sentence_pieces(golden, gguf_keys, "[SUFFIX]", "[PREFIX]")
    found = InfillTokens.of(tokenizer).prompt(tokenizer, "def f(", encode_suffix(tokenizer, "return a + b"))
    # mistral-common, tests/test_fim.py
    assert pieces(tokenizer, found) == "<s>[SUFFIX]return▁a▁+▁b[PREFIX]▁def▁f("
    alone = InfillTokens.of(tokenizer).prompt(tokenizer, "a", encode_suffix(tokenizer, "b"), add_special_tokens=False)
    assert tokenizer.bos_token_id not in alone


def test_code_llama_has_a_space_before_the_first_text_alone(
    golden: Callable[[str], Any], gguf_keys: Callable[..., Any]
) -> None:
    tokenizer = sentence_pieces(golden, gguf_keys, "▁<SUF>", "▁<PRE>", "▁<MID>", "▁<EOT>")
    tokens = InfillTokens.of(tokenizer)
    # facebookresearch/codellama, llama/generation.py, infilling_prompt_tokens
    assert (
        pieces(tokenizer, tokens.prompt(tokenizer, "def f(", encode_suffix(tokenizer, " + b")))
        == "<s>▁<PRE>▁def▁f(▁<SUF>▁+▁b▁<MID>"
    )
    assert tokens.ends == {tokenizer.token_to_id("▁<EOT>")}


def test_bytes_stand_for_themselves(tmp_path: Path) -> None:
    names = ["<|endoftext|>", "<|fim_suffix|>", "<|fim_prefix|>", "<|fim_pad|>", "<|fim_middle|>"]
    tokenizer = byte_level(tmp_path, *names)
    tokens = InfillTokens.of(tokenizer)
    found = tokens.prompt(tokenizer, "a ☺", encode_suffix(tokenizer, "\n  b"))
    assert tokenizer.decode(found, skip_special_tokens=False) == "<|fim_prefix|>a ☺<|fim_suffix|>\n  b<|fim_middle|>"
    assert tokens.ends == {tokenizer.token_to_id("<|fim_pad|>")}


def test_a_vocabulary_without_such_tokens_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no tokens for filling a gap"):
        InfillTokens.of(byte_level(tmp_path, "<fim_prefix>", "<fim_suffix>"))


def test_a_request_with_a_suffix(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    info = SimpleNamespace(max_model_len=64, vocab_size=tokenizer.vocab_size)
    server: Any = SimpleNamespace(tokenizer=tokenizer, engine=SimpleNamespace(info=info), literal_texts=None)
    asked = completion_prompts(server, ["a", "b"], add_special_tokens=True, suffix="c")
    found = [tokenizer.decode(prompt.token_ids, skip_special_tokens=False) for prompt in asyncio.run(asked)]
    assert found == [f"<fim_prefix>{text}<fim_suffix>c<fim_middle>" for text in "ab"]
    with pytest.raises(PromptTooLong) as refused:
        asyncio.run(completion_prompts(server, ["a"], add_special_tokens=True, suffix="c" * 5000))
    assert refused.value.field == "suffix"
