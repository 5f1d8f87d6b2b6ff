"""The three shapes of log-probabilities, on hand-made positions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel

from llmjax.outputs import Logprob
from llmjax.serve.logprobs import (
    LegacyLogprobs,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
    prompt_offsets,
)
from llmjax.tokenizer import Tokenizer, load_tokenizer

PIECES = {0: b"a", 1: b"b", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"ab", 5: b""}


class Pieces:
    """The one method of a tokenizer that names need."""

    def token_bytes(self, id: int) -> bytes:
        return PIECES[id]


NAMES = TokenNames(Pieces(), as_ids=False)  # type: ignore[arg-type]
POSITION = {4: Logprob(-3.0, 3), 0: Logprob(-0.5, 1), 1: Logprob(-1.0, 2)}


def test_chat_lists_the_top_without_the_sampled_token_unless_it_is_there() -> None:
    (entry,) = chat_logprobs([4], [POSITION], names=NAMES, top=2)["content"]
    assert entry["token"] == "ab" and entry["bytes"] == [97, 98] and entry["logprob"] == -3.0
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("a", -0.5), ("b", -1.0)]


def test_half_a_character_has_its_bytes() -> None:
    content = chat_logprobs([2, 3], [{2: Logprob(-1.0)}, {3: Logprob(-1.0)}], names=NAMES, top=0)["content"]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd"]
    assert bytes(content[0]["bytes"] + content[1]["bytes"]).decode() == "é"


def test_minus_infinity_becomes_openais_floor() -> None:
    (entry,) = chat_logprobs([0], [{0: Logprob(-math.inf)}], names=NAMES, top=1)["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_legacy_always_lists_the_sampled_token() -> None:
    piece = LegacyLogprobs(NAMES, top=1).format([0, 4], [None, POSITION], [0, 1])
    assert piece == {
        "tokens": ["a", "ab"],
        "token_logprobs": [None, -3.0],
        "top_logprobs": [None, {"a": -0.5, "ab": -3.0}],
        "text_offset": [0, 1],
    }


def test_ids_without_a_tokenizer() -> None:
    names = TokenNames(None, as_ids=False)
    (entry,) = chat_logprobs([4], [POSITION], names=names, top=0)["content"]
    assert entry["token"] == "token_id:4" and entry["bytes"] is None


def test_prompt_logprobs_by_id() -> None:
    assert prompt_logprobs(None, names=NAMES) is None
    shown: Any = prompt_logprobs([None, {0: Logprob(-0.5, 1)}], names=NAMES)
    assert shown == [None, {"0": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)


def test_what_the_tokenizer_adds_to_a_prompt_takes_no_place_in_its_text(tokenizer: Tokenizer) -> None:
    text = "the<|im_end|>hen"
    ids = tokenizer.encode(text)
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "the", "<|im_end|>", "he", "n"]
    assert prompt_offsets(tokenizer, ids, text) == [0, 0, 3, 13, 15]
    # After the text too; and the same text without what is special.
    assert prompt_offsets(tokenizer, [*ids, ids[0]], text) == [0, 0, 3, 13, 15, 16]
    assert prompt_offsets(tokenizer, ids, tokenizer.decode(ids)) == [0, 0, 3, 3, 5]
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt_offsets(tokenizer, ids, shown) == [0, 3, 6, 16, 18]


def test_the_space_that_a_word_begins_with_does_not_show_at_the_start(tmp_path: Path) -> None:
    words = WordLevel({"<s>": 0, "<unk>": 1, "▁the": 2, "▁hen": 3}, unk_token="<unk>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens([AddedToken("<s>", special=True)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the hen the")
    assert ids == [0, 2, 3, 2]
    assert prompt_offsets(tokenizer, ids, "the hen the") == [0, 0, 3, 7]
    assert tokenizer.detokenizer(prompt_ids=ids).whole([3, 2]) == (" hen the", [0, 4, 8])
