"""Tokenizers out of GGUF metadata: the ids of llama.cpp, except where the original tokenizer differs from it."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmjax.errors import TokenizerError
from llmjax.tokenizer import Tokenizer, load_tokenizer
from llmjax.tokenizer.gguf import tokenizer_from_gguf
from llmjax.tokenizer.pretokenizers import PRE_TOKENIZERS

Golden = Callable[[str], Any]
Same = Callable[[list[int], Any], bool]
Keys = Callable[[dict[str, Any]], dict[str, Any]]

PRE_NAMES = [
    *(
        "default",
        "llama-bpe",
        "dbrx",
        "chatglm-bpe",
        "glm4",
        "qwen2",
        "megrez",
        "qwen35",
        "gpt-4o",
        "tekken",
        "deepseek-llm",
    ),
    *(
        "deepseek-coder",
        "deepseek-v3",
        "falcon",
        "smollm",
        "gpt-2",
        "olmo",
        "roberta-bpe",
        "bloom",
        "viking",
        "bailingmoe",
    ),
    "seed-coder",
    "minicpm5",
    "spark2_5",
    "ufakzeka",
]
# Where the original has a wider class than llama.cpp's stand-in: combining marks belong to words (o200k, tekken),
# and Unicode's line separator is white space.
MARKS = {"ภาษาไทยไม่มีช่องว่าง", "हिन्दी में पाठ क्षेत्र", "e\u0301 cafe\u0301 n\u0303 Z\u0351\u036b\u0343a\u034cl\u0358go"}
SPACES = {"a\u00a0b\u2003c\u3000d\u200be\ufefff\u0085g\u2028h"}
DIFFERENT = {"gpt-4o": MARKS, "tekken": MARKS, "deepseek-llm": SPACES, "deepseek-coder": SPACES}
NORMALIZED = {"qwen2", "olmo"}


def compare(tokenizer: Tokenizer, texts: list[str], expected: list[Any], same: Same, **options: bool) -> set[str]:
    """The texts with other ids than expected."""
    return {t for t, ids in zip(texts, expected, strict=True) if not same(tokenizer.encode(t, **options), ids)}


@pytest.mark.parametrize("pre", PRE_NAMES)
def test_byte_bpe(pre: str, corpus: list[str], golden: Golden, same_ids: Same, gguf_keys: Keys) -> None:
    data = golden("byte_bpe")
    tokenizer = tokenizer_from_gguf(gguf_keys({**data["vocabulary"], "pre": pre}), source="test")
    different = compare(tokenizer, corpus, data["ids"][pre], same_ids)
    if pre in NORMALIZED:  # the originals bring text into form C, llama.cpp does not
        different = {text for text in different if unicodedata.is_normalized("NFC", text)}
        for text in corpus:
            assert tokenizer.encode(text) == tokenizer.encode(unicodedata.normalize("NFC", text))
    assert different == DIFFERENT.get(pre, set())


@pytest.mark.parametrize("case", [0, 1], ids=["all merges", "no merges of line ends"])
def test_gemma4(case: int, corpus: list[str], golden: Golden, same_ids: Same, gguf_keys: Keys) -> None:
    data = golden("gemma4")[case]
    tokenizer = tokenizer_from_gguf(gguf_keys(data["vocabulary"]), source="test")
    # Where no merges lead to them, llama.cpp has tokens for runs of line ends, but not for parts of a longer run.
    different = {text for text in corpus if case == 1 and len(text) > 100 and not text.strip("\n")}
    assert compare(tokenizer, corpus, data["ids"], same_ids) == different
    plain = compare(tokenizer, corpus, data["plain"], same_ids, add_special_tokens=False, parse_special=False)
    assert plain == different
    for text in corpus:
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text.replace("▁", " ")
    assert tokenizer.eos_token_ids == {tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("<turn|>")}


@pytest.mark.parametrize("pre", ["granite-embed-multi-311m", "sarvam-moe"])
def test_bpe_of_characters(pre: str, corpus: list[str], golden: Golden, same_ids: Same, gguf_keys: Keys) -> None:
    data, vocabulary = golden("characters")[pre], golden("gemma4")[1]["vocabulary"]
    tokenizer = tokenizer_from_gguf(gguf_keys({**vocabulary, "model": "gpt2", "pre": pre}), source="test")
    as_gemma4 = pre != "sarvam-moe"
    different = {text for text in corpus if as_gemma4 and len(text) > 100 and not text.strip("\n")}
    assert compare(tokenizer, corpus, data["ids"], same_ids) == different
    plain = compare(tokenizer, corpus, data["plain"], same_ids, add_special_tokens=False, parse_special=False)
    assert plain == different
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == as_gemma4
    assert tokenizer.decode(tokenizer.encode("a  b\n\nc")) == "a  b\n\nc"


@pytest.mark.parametrize("lowercase", [False, True])
def test_bpe_of_words(lowercase: bool, corpus: list[str], golden: Golden, same_ids: Same, gguf_keys: Keys) -> None:
    data = golden("words")
    keys = gguf_keys({**data["vocabulary"], "normalizer.lowercase": lowercase})
    tokenizer, expected = tokenizer_from_gguf(keys, source="test"), data["cases"][lowercase]
    unknown = data["vocabulary"]["unknown_token_id"]

    def known(ids: Any) -> Any:  # llama.cpp leaves characters out that are in no token
        return ids if isinstance(ids, str) else [one for one in ids if one != unknown]

    for kind, options in (("ids", {}), ("plain", {"add_special_tokens": False, "parse_special": False})):
        for text, ids in zip(corpus, expected[kind], strict=True):
            if not (lowercase and "İ" in text):  # whose lower case is two characters
                assert same_ids(known(tokenizer.encode(text, **options)), known(ids)), text
    assert tokenizer.encode("中\U0001f9ff中").count(unknown) == 3  # none of which is in the vocabulary


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
        ("jais-2", "it's 1234", ["it", "'s", " ", "123", "4"]),
        ("youtu", "한국 abcDef12", ["한국", " abc", "Def", "1", "2"]),
        ("youtu", "你好，world", ["你好", "，", "world"]),
        ("exaone-moe", "a b c, 12", ["a b c", ",", " ", "1", "2"]),
        ("afmoe", "1234567 abc 日本", ["1", "234", "567", " abc", " ", "日本"]),
        ("afmoe", "12 123", ["12", " ", "123"]),
        ("tiny_aya", "1234567 you're", ["1", "234", "567", " you're"]),
        ("superbpe", "by the way 12345", ["by the way ", "12", "345"]),
        ("chameleon", "IMGIMGABZ a1!", ["IMGIMGABZ", " a", "1", "!"]),
        ("granite-embed-multi-97m", "HelloWorld 1234", ["Hello", "World", " ", "123", "4"]),
        ("laguna", "a\n\nb", ["a", "\n\n", "b"]),
    ],
)
def test_pieces(pre: str, text: str, pieces: list[str]) -> None:
    """Pieces of pre-tokenizers that the golden file does not have, as llama.cpp's expressions cut them."""
    found = PRE_TOKENIZERS[pre].pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces


def test_pre_tokenizers_are_told_apart(golden: Golden) -> None:
    ids = golden("byte_bpe")["ids"]
    classes = {PRE_TOKENIZERS[pre].patterns for pre in PRE_NAMES}
    assert len({repr(ids[pre]) for pre in PRE_NAMES}) >= len(classes) - 1  # qwen2 and qwen35 need other texts


def test_sentencepiece_with_space_prefix(corpus: list[str], golden: Golden, same_ids: Same, gguf_keys: Keys) -> None:
    data = golden("spm")
    tokenizer = tokenizer_from_gguf(gguf_keys(data["vocabulary"]), source="test")
    assert compare(tokenizer, corpus, data["ids"], same_ids) == set()
    plain = compare(tokenizer, corpus, data["plain"], same_ids, add_special_tokens=False, parse_special=False)
    assert plain == set()
    for text in corpus:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        if (
            "mask" not in text and "im_start" not in text and "▁" not in text
        ):  # a token of its own in front of text takes the space
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_word_piece(corpus: list[str], golden: Golden, same_ids: Same, gguf_keys: Keys) -> None:
    data = golden("word_piece")
    tokenizer = tokenizer_from_gguf(gguf_keys(data["vocabulary"]), source="test")
    different = compare(tokenizer, corpus, data["ids"], same_ids)
    # BERT takes words of more than 100 characters for unknown, and U+0085 for a control character.
    assert different == SPACES | {text for text in corpus if text in ("a" * 2000, "1" * 1001)}
    ids = tokenizer.encode("Hello, lorem ipsum!")
    assert [tokenizer.id_to_token(i) for i in ids] == ["[CLS]", "hello", ",", "lorem", "ip", "##sum", "!", "[SEP]"]
    assert tokenizer.decode(ids) == "hello , lorem ipsum !"
    ids, segments = tokenizer.backend.encode_texts("Hello", "lorem", limit=None)
    assert [tokenizer.id_to_token(i) for i in ids] == ["[CLS]", "hello", "[SEP]", "lorem", "[SEP]"]
    assert segments == [0, 0, 0, 1, 1]
    plain, segments = tokenizer.backend.encode_texts("Hello", "lorem", limit=None, add_special_tokens=False)
    assert (plain, segments) == ([ids[1], ids[3]], [0, 1])


@pytest.mark.real_model
def test_smollm2(smollm2_path: Path, corpus: list[str], golden: Golden, same_ids: Same) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    assert compare(tokenizer, corpus, golden("smollm2")["ids"], same_ids) == set()
    plain = compare(
        tokenizer, corpus, golden("smollm2")["plain"], same_ids, add_special_tokens=False, parse_special=False
    )
    assert plain == set()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.eos_token_ids == {0, 2} and tokenizer.vocab_size == 49152
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    for text in corpus:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.real_model
def test_gemma3(gemma3_path: Path, corpus: list[str], golden: Golden, same_ids: Same) -> None:
    tokenizer = load_tokenizer(gemma3_path)
    # ▁ written in a text is a space to SentencePiece; llama.cpp cuts runs of spaces out before it writes them so.
    odd = {"<0x41> <0x0A> ▁ ▁▁x"}
    assert compare(tokenizer, corpus, golden("gemma3")["ids"], same_ids) == odd
    plain = compare(
        tokenizer, corpus, golden("gemma3")["plain"], same_ids, add_special_tokens=False, parse_special=False
    )
    # </s> is a user-defined piece (HTML's strike-through), so it is matched in plain text too.
    assert plain == odd | {text for text in corpus if "</s>" in text}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (2, 1, 262144)
    assert tokenizer.eos_token_ids == {1, 106}
    for text in set(corpus) - odd:
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode(ids) == text


def train(model_type: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    words = [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "ﬁne",
        "ｆｕｌｌ",
        "naïve",
        "Straße",
        "日本語",
        "текст",
        "12",
        "345",
        "don't",
    ]
    sentences = [" ".join(words[i % 13 :] + words[: i % 7]) for i in range(200)]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=out, model_type=model_type, minloglevel=2, **options
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def keys_of(sp: Any, model: str, **more: Any) -> dict[str, Any]:
    """What the converter writes for a SentencePiece model."""
    ids = range(len(sp))
    types = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([sp.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def charsmap_of(sp: Any) -> np.ndarray:
    """The normalizer's table, cut out of the serialized model: field 3, therein field 2."""

    def fields(data: bytes) -> dict[int, bytes]:
        found, at = {}, 0

        def varint() -> int:
            nonlocal at
            value = shift = 0
            while True:
                byte = data[at]
                at += 1
                value |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    return value

        while at < len(data):
            tag = varint()
            if tag & 7 == 2:
                size = varint()
                found[tag >> 3] = data[at : at + size]
                at += size
            elif tag & 7 == 5:
                at += 4
            else:
                varint()
        return found

    return np.frombuffer(fields(fields(sp.serialized_model_proto())[3])[2], np.int8)


def test_unigram_with_charsmap(corpus: list[str]) -> None:
    sp = train("unigram", vocab_size=60, hard_vocab_limit=False, normalization_rule_name="nmt_nfkc")
    keys = keys_of(sp, "t5", precompiled_charsmap=charsmap_of(sp), remove_extra_whitespaces=True, add_space_prefix=True)
    tokenizer = tokenizer_from_gguf(keys, source="test")
    for text in [*corpus, "ｆｕｌｌ ﬁne  naïve Straße é"]:
        assert tokenizer.encode(text, parse_special=False, add_special_tokens=False) == sp.encode(text), text
    assert tokenizer.encode("alpha") == [*sp.encode("alpha"), sp.eos_id()]
    # As XLM-RoBERTa has them, whose converted tokenizers say so.
    ends = {
        "bos_token_id": sp.bos_id(),
        "add_bos_token": True,
        "add_sep_token": True,
        "seperator_token_id": sp.eos_id(),
    }
    first, second, eos = sp.encode("alpha"), sp.encode("beta"), sp.eos_id()
    pairs = tokenizer_from_gguf(keys | {f"tokenizer.ggml.{key}": value for key, value in ends.items()}, source="test")
    ids, segments = pairs.backend.encode_texts("alpha", "beta", limit=None)
    assert ids == [sp.bos_id(), *first, eos, eos, *second, eos] and not any(segments)
    assert len(pairs.backend.encode_texts("alpha", "beta", limit=5)[0]) == 5
    assert pairs.backend.encode_texts("alpha", "beta", limit=None, add_special_tokens=False)[0] == [*first, *second]


def test_bpe_without_prefix_or_byte_fallback(corpus: list[str]) -> None:
    sp: Any = train(
        "bpe",
        vocab_size=120,
        add_dummy_prefix=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    keys = keys_of(sp, "llama", add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    tokenizer = tokenizer_from_gguf(keys, source="test")
    for text in corpus:
        assert tokenizer.encode(text, parse_special=False) == [*sp.encode(text), sp.eos_id()], text


def test_a_file_on_disk(tmp_path: Path, golden: Golden) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    for key, value in {**golden("spm")["vocabulary"], "pre": "default"}.items():
        add = writer.add_string if isinstance(value, str) else writer.add_array
        add(f"tokenizer.ggml.{key}", value)
    writer.add_chat_template("{{ messages[0].content }}{{ bos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "v.gguf")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi<s>"
    assert tokenizer.token_to_id("<|im_start|>") is not None
    overridden = load_tokenizer(tmp_path / "v.gguf", chat_template="chatml")
    assert overridden.apply_chat_template([{"role": "user", "content": "Hi"}]).startswith("<|im_start|>")


def small(**changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<|end|>", "<|im_end|>", "Ġ"],
        "merges": ["a b"],
        "token_type": np.array([1, 1, 1, 3, 1, 1], np.int32),
        "eos_token_id": 3,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, r"tokenizer\.ggml\.model 'rwkv'"),
        ({"model": None}, r"tokenizer\.ggml\.model None"),
        ({"model": ["gpt2"]}, r"tokenizer\.ggml\.model \['gpt2'\]"),
        ({"model": np.array([1, 2])}, r"tokenizer\.ggml\.model array"),
        ({"pre": "unheard-of"}, r"tokenizer\.ggml\.pre 'unheard-of'"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokens": ["a", 1]}, r"tokenizer\.ggml\.tokens"),
        ({"merges": None}, r"tokenizer\.ggml\.merges"),
        ({"merges": ["ab"]}, r"tokenizer\.ggml\.merges"),
        ({"merges": ["x y"]}, r"tokenizer\.ggml\.merges"),
        ({"merges": [""]}, r"tokenizer\.ggml\.merges"),
        ({"token_type": np.array([1, 1], np.int32)}, r"tokenizer\.ggml\.token_type"),
        ({"token_type": [1] * 6}, r"tokenizer\.ggml\.token_type"),
        ({"eos_token_id": "x"}, r"tokenizer\.ggml\.eos_token_id"),
        ({"add_bos_token": "yes"}, r"tokenizer\.ggml\.add_bos_token"),
        ({"model": "llama", "scores": np.array([1.0], np.float32)}, r"tokenizer\.ggml\.scores"),
        ({"model": "llama", "token_type": np.array([1, 6, 1, 3, 1, 1], np.int32)}, r"tokenizer\.ggml\.tokens"),
        ({"model": "t5", "precompiled_charsmap": np.array([1], np.int8)}, r"tokenizer\.ggml\."),
    ],
)
def test_malformed_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        tokenizer_from_gguf(small(**changes), source="file.gguf")
    assert "\n" not in str(caught.value)


def test_flags_and_ends() -> None:
    tokenizer = tokenizer_from_gguf(small(), source="x")
    assert tokenizer.encode("ab a<|im_end|>") == [2, 5, 0, 4]
    assert tokenizer.eos_token_ids == {3, 4} and tokenizer.all_special_ids == {3, 4}
    both = tokenizer_from_gguf(small(add_bos_token=True, add_eos_token=True, bos_token_id=4), source="x")
    assert both.encode("ab") == [4, 2, 3] and both.encode("ab", add_special_tokens=False) == [2]
    # In the harmony format <|end|> ends a message, not the answer.
    harmony = ["<|return|>", "<|call|>", "<|end|>", "a"]
    keys = small(tokens=harmony, token_type=np.array([3, 3, 3, 1], np.int32), merges=[], eos_token_id=0)
    assert tokenizer_from_gguf(keys, source="x").eos_token_ids == {0, 1}


def test_repeated_and_empty_tokens_keep_their_ids() -> None:
    keys = small(tokens=["a", "", "ab", "a", "b", "Ġ"], token_type=None, merges=["a b"], eos_token_id=None)
    tokenizer = tokenizer_from_gguf(keys, source="x")
    assert tokenizer.encode("ab a") == [2, 5, 3] and tokenizer.vocab_size == 6


def test_long_runs_come_back(golden: Golden, gguf_keys: Keys) -> None:
    """Where patterns try every way to cut a run, this takes minutes; ``benchmarks/tokenizer.py`` has the time."""
    data = golden("byte_bpe")["vocabulary"]
    for pre in {p.patterns: name for name, p in PRE_TOKENIZERS.items() if p.merged == "bytes"}.values():
        tokenizer = tokenizer_from_gguf(gguf_keys({**data, "pre": pre}), source="test")
        for text in (
            " " * 20_000,
            " " * 20_000 + "中",
            "\t" * 10_000 + "x",
            "'" * 20_000,
            "a" * 20_000,
            "1" * 20_000 + ".",
        ):
            assert tokenizer.decode(tokenizer.encode(text)) == text, (pre, text[-2:])


def test_any_token_may_stand_for_what_word_pieces_do_not_know() -> None:
    tokenizer = tokenizer_from_gguf(small(model="bert", unknown_token_id=0), source="small.gguf")
    assert tokenizer.encode("é") == [0]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["gpt2", "whitespace", "gemma4", "llama", "bert", "t5"]),
    st.dictionaries(
        st.sampled_from(
            ["tokens", "scores", "token_type", "merges", "eos_token_id", "unknown_token_id", "precompiled_charsmap"]
        ),
        st.one_of(
            st.none(),
            st.integers(-3, 2**40),
            st.lists(st.text(max_size=4), max_size=8),
            st.lists(st.integers(-2, 9), max_size=8).map(lambda values: np.array(values, np.int32)),
            st.lists(st.floats(width=32), max_size=8).map(lambda values: np.array(values, np.float32)),
            st.binary(max_size=12).map(lambda data: np.frombuffer(data, np.uint8)),
        ),
        max_size=4,
    ),
)
def test_any_keys_give_a_tokenizer_or_a_clear_error(model: str, changes: dict[str, Any]) -> None:
    try:
        tokenizer = tokenizer_from_gguf(small(model=model, **changes), source="fuzz.gguf")
    except TokenizerError as error:
        assert "\n" not in str(error)
    else:
        tokenizer.decode(tokenizer.encode("ab <|end|> é"))
