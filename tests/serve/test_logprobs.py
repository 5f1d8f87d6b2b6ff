"""The three shapes of log-probabilities, on hand-made positions."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmjax.outputs import Logprob
from llmjax.serve.logprobs import LegacyLogprobs, TokenNames, chat_logprobs, prompt_logprobs

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
    piece = LegacyLogprobs(NAMES, top=1).format([0, 4], [None, POSITION])
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


@given(st.lists(st.sampled_from(sorted(PIECES))), st.integers(0, 8))
def test_offsets_are_lengths_of_the_text_before_however_it_is_cut(ids: list[int], cut: int) -> None:
    positions = [{i: Logprob(-1.0, 1)} for i in ids]
    whole = LegacyLogprobs(NAMES, top=0).format(ids, positions)
    parts = LegacyLogprobs(NAMES, top=0)
    pieces = [parts.format(ids[:cut], positions[:cut]), parts.format(ids[cut:], positions[cut:])]
    for name, values in whole.items():
        assert values == pieces[0][name] + pieces[1][name]
    offsets = whole["text_offset"]
    assert offsets == sorted(offsets)
    for index, offset in enumerate(offsets):
        before = b"".join(PIECES[i] for i in ids[:index]).decode("utf-8", "replace")
        # A token may begin inside a character, which counts once it is complete.
        assert offset in (len(before), len(before) - 1)
