"""Texts that are encoded segment by segment have the ids of the whole, and segments that are known are not encoded."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from llmjax.tokenizer.backend import Backend, CutRules, HuggingFaceBackend, SentencePieceBackend
from llmjax.tokenizer.segments import SHORTEST, SegmentCache, safe_cuts
from tests.tokenizer.test_long_texts import MERGES

START, END, TRIMMING = "<|start|>", "<|end|>", "<|trims|>"
ADDED = (
    AddedToken(START, special=True),
    AddedToken(END, special=True),
    AddedToken(TRIMMING, special=True, lstrip=True, rstrip=True),
    AddedToken("<tool>", normalized=True),
    AddedToken("the", single_word=True, normalized=False),
)
WORDS = (
    "the",
    " quick",
    "  ",
    "\n",
    "é",
    "Ａ",
    "▁",
    "<",
    "|>",
    "<|start",
    "<tool>",
    START,
    END,
    TRIMMING,
    "qu" * SHORTEST,
)
texts = st.lists(st.sampled_from(WORDS), max_size=24).map("".join)


def byte_level() -> tokenizers.Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    made = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    pieces = ("<unk>", "▁", "▁the", "the", "▁qu", "qu", "ick", "é", "A", "Ａ", "\n", "<", "|", ">", *"stareoqui")
    made = tokenizers.Tokenizer(models.Unigram([(piece, -float(len(piece) < 2)) for piece in pieces], 0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return made


def prepending() -> tokenizers.Tokenizer:
    made = metaspace("never")
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def with_tokens(made: tokenizers.Tokenizer) -> Backend:
    made.add_tokens(list(ADDED))
    return HuggingFaceBackend(made)


def sentencepieces() -> Backend:
    """A model that puts a space before the first stretch, and one for the others that puts none."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick", "quick the é A"] * 9), model_writer=out, model_type="bpe", vocab_size=280,
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    outer = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    proto = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    proto.normalizer_spec.add_dummy_prefix = False
    inner = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    rules = CutRules(special={START: 280, END: 281}, literal={TRIMMING: 282})
    return SentencePieceBackend(outer, rules, inner=inner)


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte-level": lambda: with_tokens(byte_level()),
    "first": lambda: with_tokens(metaspace("first")),
    "always": lambda: with_tokens(metaspace("always")),
    "prepending": lambda: with_tokens(prepending()),
    "sentencepiece": sentencepieces,
}


@functools.cache
def made(name: str) -> Backend:
    return BACKENDS[name]()


@pytest.mark.parametrize("name", BACKENDS)
@given(parts=st.lists(texts, min_size=1, max_size=4))
def test_ids_are_those_of_the_whole(name: str, parts: list[str]) -> None:
    """Conversations grow, so that most segments are known."""
    backend = made(name)
    cuts = safe_cuts(backend.cut_out(), [START, END])
    assert cuts == [START, END]
    encode = functools.partial(backend.encode, add_special_tokens=False, parse_special=True)
    cache = SegmentCache(cuts, encode, most_chars=4 * SHORTEST)
    for count in range(1, len(parts) + 1):
        text = START.join(parts[:count])
        assert cache.ids(text, kept_for="") == encode(text)


def test_what_is_known_is_not_encoded_again() -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [ord(character) for character in text]

    one, two, three = (f"{START}{letter * SHORTEST}" for letter in "abc")
    cache = SegmentCache([START, END], encode, most_chars=2 * len(one))
    assert cache.ids(f"head{one}{END}", kept_for="me") == [ord(character) for character in f"head{one}{END}"]
    assert encoded == ["head", one, END]
    del encoded[:]
    assert cache.ids(one + two, kept_for="me") == [ord(character) for character in one + two]
    assert encoded == [two]
    cache.ids(one, kept_for="me")
    cache.ids(three, kept_for="me")  # takes the place of the second, which was used before the first
    del encoded[:]
    cache.ids(one + two, kept_for="me")
    assert encoded == [two]
    long = START + "d" * 2 * len(one)  # more than is kept of all
    del encoded[:]
    cache.ids(long, kept_for="me")
    cache.ids(long, kept_for="me")
    assert encoded == [long, long]


def test_what_is_kept_for_one_is_not_found_for_another() -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [ord(character) for character in text]

    one = f"{START}{'a' * SHORTEST}"
    cache = SegmentCache([START], encode, most_chars=2 * len(one))
    for kept_for in ("", "me", "you", "me", "you"):  # there is room for two
        assert cache.ids(one, kept_for=kept_for) == [ord(character) for character in one]
    assert encoded == 3 * [one]
    cache.ids(one, kept_for="")
    assert encoded == 4 * [one]


@pytest.mark.parametrize(
    ("tokens", "cuts"),
    [
        (["<a>", "<b>"], ["<a>", "<b>"]),
        (["<a>", "<a><b>"], ["<a><b>"]),  # the longer one is taken where it is spelled
        (["<a>", "x<a"], ["x<a"]),
        (["<a>", "x<a>y"], ["x<a>y"]),
        (["aba"], []),  # in "ababa" the second one is none
    ],
)
def test_no_other_token_may_lie_across(tokens: list[str], cuts: list[str]) -> None:
    assert safe_cuts([AddedToken(token, normalized=False) for token in tokens], tokens) == cuts


def test_what_depends_on_its_surroundings_is_not_cut_at() -> None:
    given = [*ADDED, AddedToken(" spaced", normalized=False)]
    cut_out = [token for token in given if not token.normalized]
    assert safe_cuts(cut_out, [token.content for token in given]) == [START, END]
    assert safe_cuts(cut_out, ["unknown"]) == []


def test_without_cuts_a_text_is_one_segment() -> None:
    assert SegmentCache([], lambda text: [len(text)]).ids(f"a{START}b", kept_for="") == [len(START) + 2]
