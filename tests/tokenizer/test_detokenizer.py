"""Chunks of text joined equal the decode of all ids, and no chunk ends inside a character."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from llmjax.errors import TokenizerError
from llmjax.tokenizer import Tokenizer
from llmjax.tokenizer.backend import HuggingFaceBackend
from llmjax.tokenizer.gguf import tokenizer_from_gguf
from llmjax.tokenizer.pieces import decoder_of
from llmjax.tokenizer.tokenizer import SpecialTokens

pytestmark = pytest.mark.smoke

Golden = Callable[[str], Any]
Keys = Callable[[dict[str, Any]], dict[str, Any]]
IDS = st.lists(st.integers(0, 10**6), max_size=60)


@pytest.fixture(scope="module", params=["byte_bpe", "spm", "word_piece"])
def tokenizer(request: pytest.FixtureRequest, golden: Golden, gguf_keys: Keys) -> Tokenizer:
    keys = gguf_keys({**golden(request.param)["vocabulary"], "pre": "gpt-2"})
    return tokenizer_from_gguf(keys, source="test")


def biased(tokenizer: Tokenizer, ids: list[int], *, to_bytes: bool) -> list[int]:
    """Ids inside the vocabulary; ``to_bytes`` prefers the low ones, where single bytes are."""
    return [i % (min(270, tokenizer.vocab_size) if to_bytes else tokenizer.vocab_size + 3) for i in ids]


@settings(max_examples=200)
@given(IDS, st.lists(st.integers(0, 5), max_size=60), st.booleans(), st.booleans(), st.booleans())
def test_chunks_join_to_the_whole(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], to_bytes: bool, skip: bool, spaces: bool
) -> None:
    ids = biased(tokenizer, ids, to_bytes=to_bytes)
    options: Any = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    detokenizer = tokenizer.detokenizer(**options)
    chunks, at = [], 0
    for cut in cuts:
        chunks.append(detokenizer.add(ids[at : at + cut]))
        at += cut
    chunks.append(detokenizer.add(ids[at:]))
    assert "".join(chunks) + detokenizer.finish() == tokenizer.decode(ids, **options)


@given(IDS, st.booleans(), st.booleans())
def test_offsets_are_lengths_of_the_text_before(
    tokenizer: Tokenizer, ids: list[int], to_bytes: bool, skip: bool
) -> None:
    ids = biased(tokenizer, ids, to_bytes=to_bytes)
    text, offsets = tokenizer.detokenizer(skip_special_tokens=skip).whole(ids)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert len(offsets) == len(ids) + 1 and offsets == sorted(offsets)
    for index, offset in enumerate(offsets):
        before = len(tokenizer.decode(ids[:index], skip_special_tokens=skip))
        # A token may begin inside a character, which counts once it is complete; each of its bytes may become one.
        assert before - 3 <= offset <= before


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_text_is_never_cut_inside_a_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    shown = ""
    for token_id in ids:
        shown += detokenizer.add([token_id])
        assert whole.startswith(shown)
    assert shown + detokenizer.finish() == whole


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_byte_level_round_trip(byte_bpe: Tokenizer, text: str) -> None:
    ids = byte_bpe.encode(text, add_special_tokens=False)
    assert byte_bpe.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(byte_bpe.token_bytes, ids)) == text.encode()


@pytest.fixture(scope="module")
def byte_bpe(golden: Golden, gguf_keys: Keys) -> Tokenizer:
    return tokenizer_from_gguf(gguf_keys({**golden("byte_bpe")["vocabulary"], "pre": "gpt-2"}), source="test")


def test_lone_surrogates_are_replaced(byte_bpe: Tokenizer) -> None:
    assert byte_bpe.decode(byte_bpe.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"
    assert byte_bpe.decode(byte_bpe.encode("\ud83d\ude00")) == "😀"


def test_ids_without_a_token_are_empty(byte_bpe: Tokenizer) -> None:
    assert byte_bpe.decode([10**6, -1]) == ""
    assert byte_bpe.id_to_token(10**6) == "" and byte_bpe.token_bytes(-1) == b""
    assert byte_bpe.token_to_id("no such token") is None


def test_bytes_of_a_character_wait(byte_bpe: Tokenizer) -> None:
    first, *rest = [byte_bpe.token_to_id(char) for char in "ðŁĺĢ"]  # 😀 byte by byte
    assert first is not None
    detokenizer = byte_bpe.detokenizer()
    assert [detokenizer.add([i]) for i in (first, *rest) if i is not None] == ["", "", "", "😀"]
    detokenizer = byte_bpe.detokenizer()
    assert detokenizer.add([first]) == "" and detokenizer.finish() == "\ufffd"
    # Begun in the prompt, finished in the answer.
    detokenizer = byte_bpe.detokenizer(prompt_ids=[5, first])
    assert detokenizer.add([i for i in rest if i is not None]) == "😀"


def test_leading_space_after_a_prompt(golden: Golden, gguf_keys: Keys) -> None:
    tokenizer = tokenizer_from_gguf(gguf_keys(golden("spm")["vocabulary"]), source="test")
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.detokenizer().add(ids) == "the fox"
    assert tokenizer.detokenizer(prompt_ids=[1]).add(ids) == "the fox"  # BOS shows nothing
    assert tokenizer.detokenizer(prompt_ids=[1, *ids]).add(ids) == " the fox"


def test_spaces_between_special_tokens(golden: Golden, gguf_keys: Keys) -> None:
    tokenizer = tokenizer_from_gguf(gguf_keys(golden("word_piece")["vocabulary"]), source="test")
    ids = tokenizer.encode("[CLS][SEP]hello", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[CLS] [SEP] hello"
    tight = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert tight == "[CLS][SEP] hello"


def test_invalid_bytes_as_sentencepiece_shows_them() -> None:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab cd é"] * 5), model_writer=out, model_type="bpe", vocab_size=275, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    sp: Any = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(len(sp))],
        "tokenizer.ggml.token_type": np.array(
            [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in range(len(sp))],
            "int32",
        ),
    }
    tokenizer = tokenizer_from_gguf(keys, source="test")
    draw = random.Random(0)
    for _ in range(500):
        ids = [draw.randrange(3, len(sp)) for _ in range(draw.randrange(12))]
        if ids and sp.id_to_piece(ids[0]) != "<0x20>":  # a first space is dropped even as a byte, as transformers does
            assert tokenizer.decode(ids) == sp.decode(ids), ids


def wrap(pipeline: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(HuggingFaceBackend(pipeline), decoder_of(pipeline, source="test"), special=SpecialTokens())


VOCABULARY = {
    t: i
    for i, t in enumerate(
        ["a", "▁a", "▁", "▁▁", "##b", "b", ".", "n't", "'s", "do", "not", "<0xC3>", "<0xA9>", "Ġ", "Ã", "x y", "é"]
    )
}
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "word piece": decoders.WordPiece(),
    "word piece as it is": decoders.WordPiece(cleanup=False),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_equal_those_of_the_library(name: str) -> None:
    pipeline = tokenizers.Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    if DECODERS[name] is not None:
        pipeline.decoder = DECODERS[name]
    ours, draw = wrap(pipeline), random.Random(1)
    for _ in range(1000):
        ids = [draw.randrange(len(VOCABULARY)) for _ in range(draw.randrange(9))]
        # In a run of byte tokens the library replaces even whole characters if the run is not UTF-8 as a whole.
        if "Replace" in str(DECODERS[name]) and {11, 12} & set(ids):
            ids = [i for i in ids if i not in (11, 12)] + [11, 12]
        assert ours.decode(ids) == pipeline.decode(ids), [pipeline.id_to_token(i) for i in ids]


def test_unknown_decoder() -> None:
    pipeline = tokenizers.Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    pipeline.decoder = decoders.CTC()
    with pytest.raises(TokenizerError, match="CTC"):
        wrap(pipeline)


def test_added_tokens_are_shown_as_the_library_does() -> None:
    pipeline = tokenizers.Tokenizer(models.BPE({"a": 0, "Ġ": 1}, []))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_tokens([AddedToken("<｜User｜>"), AddedToken("  ")])
    text = "a<｜User｜>a   a"
    ids = pipeline.encode(text).ids
    assert wrap(pipeline).decode(ids) == pipeline.decode(ids) == text


def test_work_does_not_grow_with_the_text(byte_bpe: Tokenizer) -> None:
    """Counted in calls of functions, Python's and built-in ones."""
    detokenizer = byte_bpe.detokenizer()
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    ids = byte_bpe.encode("The quick brown fox 你好 😀 " * 500)
    for token_id in ids[: len(ids) // 2]:  # pieces are looked up once
        detokenizer.add((token_id,))
    sys.setprofile(count)
    for token_id in ids[len(ids) // 2 :]:
        detokenizer.add((token_id,))
    sys.setprofile(None)
    assert 0 < calls < 20 * len(ids) / 2
