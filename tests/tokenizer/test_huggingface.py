"""Tokenizers out of Hugging Face folders: the ids of the libraries that read the same files."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from llmjax.errors import TokenizerError
from llmjax.tokenizer import Tokenizer, huggingface, load_tokenizer

Golden = Callable[[str], Any]


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def pipeline(golden: Golden) -> tokenizers.Tokenizer:
    """A pipeline as Llama 3's, over the small golden vocabulary, with leftovers of its training."""
    vocabulary = golden("byte_bpe")["vocabulary"]
    merges = [tuple(merge.split(" ")) for merge in vocabulary["merges"]]
    pipeline = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary["tokens"])}, merges))
    pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(t, special=True) for t in vocabulary["tokens"][:3]])
    pipeline.add_tokens([AddedToken("<tool>", normalized=False)])
    pipeline.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return pipeline


def check_like_library(ours: Tokenizer, pipeline: tokenizers.Tokenizer, corpus: list[str]) -> None:
    for text in [*corpus, "a<tool>b <|im_end|> c"]:
        for special in (True, False):
            ids = pipeline.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == ids
        assert ours.decode(ids) == pipeline.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == pipeline.decode(ids, skip_special_tokens=False)


def test_tokenizer_json_as_it_is(tmp_path: Path, pipeline: tokenizers.Tokenizer, corpus: list[str]) -> None:
    reference = tokenizers.Tokenizer.from_str(pipeline.to_str())
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=8)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|endoftext|>", "chat_template": "{{ eos_token }}"}
    write(tmp_path, "tokenizer_config.json", config)
    tokenizer = load_tokenizer(tmp_path)
    check_like_library(tokenizer, reference, corpus)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 2, None)
    assert tokenizer.eos_token_ids == {2} and tokenizer.all_special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<|im_end|>"
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("x") == tokenizer.encode("x")


def test_special_tokens_as_plain_text(tmp_path: Path, pipeline: tokenizers.Tokenizer) -> None:
    pipeline.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("<|im_end|><tool>", add_special_tokens=False, parse_special=False)
    assert 2 not in ids and ids[-1] == tokenizer.token_to_id("<tool>") and tokenizer.decode(ids) == "<|im_end|><tool>"
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2]


def test_added_tokens_of_the_config(tmp_path: Path, pipeline: tokenizers.Tokenizer) -> None:
    pipeline.save(str(tmp_path / "tokenizer.json"))
    size = pipeline.get_vocab_size()
    added = {
        str(size): {"content": "<new>", "special": True, "normalized": False},
        str(size + 1): {"content": "<plain>", "special": False, "normalized": False},
    }
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": added, "pad_token": "<new>"})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<new><plain>", add_special_tokens=False)[-2:] == [size, size + 1]
    assert (
        tokenizer.pad_token_id == size
        and size in tokenizer.all_special_ids
        and size + 1 not in tokenizer.all_special_ids
    )
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<new>"}}})
    with pytest.raises(TokenizerError, match="'<new>' is declared as 7"):
        load_tokenizer(tmp_path)


class Counting:
    """A pipeline that counts how often each of its methods is asked for."""

    def __init__(self, pipeline: tokenizers.Tokenizer) -> None:
        self.pipeline = pipeline
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.pipeline, name)


@pytest.mark.parametrize("known", [0, 300])
def test_what_thousands_of_added_tokens_cost_grows_with_their_number(
    known: int, tmp_path: Path, pipeline: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library copies all added tokens to list them, and makes its matcher anew with each call that adds some."""
    first = pipeline.get_vocab_size()
    added = [AddedToken(f"<unused{i}>", normalized=False, special=i % 3 == 0) for i in range(400)]
    pipeline.add_tokens(added[:known])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    entries = {
        first + i: {"content": token.content, **{flag: getattr(token, flag) for flag in flags}}
        for i, token in enumerate(added)
    }
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": entries})
    counting = Counting(tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    monkeypatch.setattr(huggingface, "_pipeline_of_file", lambda path, config: counting)
    tokenizer = load_tokenizer(tmp_path)
    assert counting.calls["get_added_tokens_decoder"] <= 2
    assert counting.calls["add_tokens"] + counting.calls["add_special_tokens"] <= 1
    assert tokenizer.all_special_ids == {0, 1, 2} | {first + i for i in range(0, 400, 3)}
    assert tokenizer.encode("<unused1><unused399>", add_special_tokens=False) == [first + 1, first + 399]
    assert tokenizer.decode([first, first + 1]) == "<unused1>"


def test_llama_classes_follow_add_bos_token(tmp_path: Path, pipeline: tokenizers.Tokenizer) -> None:
    pipeline.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    plain = pipeline.encode("abc", add_special_tokens=False).ids
    for flags, expected in (
        ({}, [0, *plain]),
        ({"add_bos_token": True}, [1, *plain]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, *plain, 2]),
        ({"add_bos_token": False}, plain),
    ):
        write(tmp_path, "tokenizer_config.json", config | flags)
        assert load_tokenizer(tmp_path).encode("abc") == expected


@pytest.fixture(scope="module")
def model() -> bytes:
    """A SentencePiece BPE as Llama 2's."""
    words = ["alpha", "beta", "gamma", "delta", "eps", "don't", "Straße", "日本", "12"]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words[i:] + words[:i]) for i in range(9)] * 4),
        model_writer=out, model_type="bpe", vocab_size=340, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=["<box>"], minloglevel=2,
    )  # fmt: skip
    return out.getvalue()


def test_sentencepiece_model(tmp_path: Path, model: bytes, corpus: list[str]) -> None:
    sp: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
    (tmp_path / "tokenizer.model").write_bytes(model)
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True})
    tokenizer = load_tokenizer(tmp_path)
    for text in [*corpus, "alpha<box>beta"]:
        ids = sp.encode(text)
        assert tokenizer.encode(text, parse_special=False) == [sp.bos_id(), *ids, sp.eos_id()]
        if not text.startswith(" "):
            assert tokenizer.decode(ids) == sp.decode(ids)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2) and tokenizer.special.texts["bos_token"] == "<s>"
    assert tokenizer.encode("alpha</s>") == [1, *sp.encode("alpha"), 2, 2]


def test_legacy_decides_about_the_space_after_special_tokens(tmp_path: Path, model: bytes) -> None:
    sp: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
    (tmp_path / "tokenizer.model").write_bytes(model)
    added = {str(len(sp)): {"content": "<|im_end|>", "special": True}}
    config = {"add_bos_token": False, "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    text, end = "alpha<|im_end|>beta", len(sp)
    write(tmp_path, "tokenizer_config.json", config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(text) == [*sp.encode("alpha"), end, *sp.encode("beta")]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == "alpha<|im_end|> beta"
    assert tokenizer.vocab_size == len(sp) + 1 and tokenizer.eos_token_id == end
    write(tmp_path, "tokenizer_config.json", {**config, "legacy": False})
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[: ids.index(end)] == sp.encode("alpha") and not sp.id_to_piece(ids[ids.index(end) + 1]).startswith("▁")


def test_chatglm3(tmp_path: Path, model: bytes, corpus: list[str]) -> None:
    """Its code appends tokens to the model's, two of which stand in front of every text."""
    sp: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
    (tmp_path / "tokenizer.model").write_bytes(model)
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "ChatGLMTokenizer"})
    tokenizer, first = load_tokenizer(tmp_path), len(sp)
    before = [first + 1, first + 3]  # [gMASK] and sop
    for text in corpus:
        assert tokenizer.encode(text, parse_special=False) == [*before, *sp.encode(text)]
    text = "[gMASK]sop<|user|>\n alpha<|assistant|>"
    ids = [*before, first + 6, *sp.encode("\n alpha"), first + 7]
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.vocab_size == first + 9 and tokenizer.eos_token_id == sp.eos_id()
    assert tokenizer.decode([*ids[3:-1], first + 8]) == sp.decode(sp.encode("\n alpha"))


def test_vocab_and_merges(tmp_path: Path, golden: Golden, corpus: list[str]) -> None:
    vocabulary = golden("byte_bpe")["vocabulary"]
    write(tmp_path, "vocab.json", {t: i for i, t in enumerate(vocabulary["tokens"])})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(vocabulary["merges"]) + "\n", encoding="utf-8")
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    tokenizer = load_tokenizer(tmp_path)
    reference = tokenizers.Tokenizer(models.BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.add_special_tokens(["<|endoftext|>"])
    for text in corpus:
        assert tokenizer.encode(text) == reference.encode(text).ids
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "OddTokenizer"})
    with pytest.raises(TokenizerError, match="OddTokenizer"):
        load_tokenizer(tmp_path)


def test_vocab_txt(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "wor", "##ld", "!", "cafe"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hello  WORLD! café xyz [MASK]") == [2, 5, 6, 7, 8, 9, 1, 4, 3]
    assert tokenizer.decode([2, 5, 6, 7, 8, 3]) == "hello world!"
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(TokenizerError, match=r"vocab\.txt: has no \[UNK\]"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json"),
        ("tokenizer.json", "{}", r"tokenizer\.json"),
        ("tokenizer.model", "garbage", r"tokenizer\.model"),
        ("tokenizer.model", "IQ== 0\nIg== 1\n", "is a file of ranks"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', r"tokenizer_config\.json"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', r"tokenizer_config\.json"),
        ("README.md", "", "no tokenizer found"),
    ],
)
def test_malformed_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_such_place(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="neither a folder"):
        load_tokenizer(tmp_path / "absent")


def test_no_template(tmp_path: Path, pipeline: tokenizers.Tokenizer) -> None:
    pipeline.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template="chatml")
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    continued = tokenizer.apply_chat_template(
        [{"role": "assistant", "content": "x y"}], chat_template="chatml", continue_final_message=True
    )
    assert continued == "<|im_start|>assistant\nx y"
    source = "{{ flag }}{{ tools[0].type }}{{ documents[0].text }}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}],
        chat_template=source,
        tools=[{"type": "f"}],
        documents=[{"text": "d"}],
        flag=7,
    )
    assert text == "7fd"
