"""Tokenizers of folders written as GGUF keys: read back, they give the same ids."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from llmjax.errors import TokenizerError
from llmjax.tokenizer import Tokenizer, load_tokenizer
from llmjax.tokenizer.gguf import tokenizer_from_gguf
from llmjax.tokenizer.gguf_export import tokenizer_metadata
from llmjax.tokenizer.pretokenizers import pre_tokenizer_named

Golden = Callable[[str], Any]
CONFIG = {
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "chat_template": [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}],
}


def byte_bpe(folder: Path, golden: Golden, *, pre: str, bos: bool = False) -> tokenizers.Tokenizer:
    vocabulary = golden("byte_bpe")["vocabulary"]
    merges = [tuple(merge.split(" ")) for merge in vocabulary["merges"]]
    named = pre_tokenizer_named(pre)
    model = models.BPE({t: i for i, t in enumerate(vocabulary["tokens"])}, merges, ignore_merges=named.ignore_merges)
    pipeline = tokenizers.Tokenizer(model)
    pipeline.pre_tokenizer, pipeline.decoder = named.pre_tokenizer(), decoders.ByteLevel()
    if (normalizer := named.normalizer()) is not None:
        pipeline.normalizer = normalizer
    pipeline.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in vocabulary["tokens"][:3]])
    pipeline.add_tokens([AddedToken("<tool>", normalized=False)])
    if bos:
        pipeline.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    pipeline.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return pipeline


def check(folder: Path, metadata: dict[str, Any], corpus: list[str], *more: str) -> Tokenizer:
    original, exported = load_tokenizer(folder), tokenizer_from_gguf(metadata, source="x.gguf")
    for text in (*corpus, *more):
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special)
            assert exported.encode(text, add_special_tokens=special) == ids
    assert (exported.bos_token_id, exported.eos_token_id) == (original.bos_token_id, original.eos_token_id)
    return exported


@pytest.mark.parametrize(
    ("pre", "written"),
    [
        ("llama-bpe", "llama-bpe"),
        ("qwen2", "qwen2"),
        ("smollm", "smollm"),
        ("gpt-2", "gpt-2"),
        ("tekken", "tekken"),
        ("gpt-4o", "gpt-4o"),
        ("starcoder", "smollm"),
        ("olmo", "olmo"),
    ],
)
def test_byte_level_vocabularies(tmp_path: Path, golden: Golden, corpus: list[str], pre: str, written: str) -> None:
    size = byte_bpe(tmp_path, golden, pre=pre, bos=pre == "llama-bpe").get_vocab_size()
    metadata = tokenizer_metadata(tmp_path, vocab_size=size + 5)
    assert metadata["tokenizer.ggml.pre"] == written
    assert metadata["tokenizer.ggml.add_bos_token"] == (pre == "llama-bpe")
    assert not metadata["tokenizer.ggml.add_eos_token"]
    assert metadata["tokenizer.ggml.tokens"][size:] == [f"[PAD{i}]" for i in range(size, size + 5)]
    assert metadata["tokenizer.ggml.token_type"][[0, size - 1, size]].tolist() == [3, 4, 5]
    exported = check(tmp_path, metadata, corpus, "a<tool>b <|im_end|> c")
    assert exported.chat_template is not None and dict(exported.chat_template.sources) == {
        "default": "{{ 1 }}",
        "tool_use": "{{ 2 }}",
    }


def sentencepiece_model(**options: Any) -> bytes:
    words = ["alpha", "beta", "gamma", "delta", "eps", "don't", "Straße", "日本", "12"]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words[i:] + words[:i]) for i in range(9)] * 4),
        model_writer=out, model_type="bpe", vocab_size=340, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2, **options,
    )  # fmt: skip
    return out.getvalue()


@pytest.mark.parametrize(("prefix", "defined"), [(False, ["<box>"]), (False, []), (True, [])])
def test_sentencepiece_models(tmp_path: Path, corpus: list[str], prefix: bool, defined: list[str]) -> None:
    data = sentencepiece_model(add_dummy_prefix=prefix, user_defined_symbols=defined)
    (tmp_path / "tokenizer.model").write_bytes(data)
    added = {"340": {"content": "<turn>", "special": True}, "341": {"content": "<plain>", "special": False}}
    config = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    metadata = tokenizer_metadata(tmp_path, vocab_size=344)
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert metadata["tokenizer.ggml.add_bos_token"] and metadata["tokenizer.ggml.add_eos_token"]
    assert metadata["tokenizer.ggml.scores"].dtype == np.float32
    check(tmp_path, metadata, corpus, "alpha<box>beta", "<turn>alpha <plain>beta")


def test_no_space_after_user_defined_pieces_cannot_be_said(tmp_path: Path) -> None:
    """GGUF's readers put the space in front of every part of a text, the library in front of the whole."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(user_defined_symbols=["<box>"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(TokenizerError, match="text 'a<box> b<box>c' would get other ids"):
        tokenizer_metadata(tmp_path, vocab_size=340)


def test_merges_with_byte_fallback_become_scores(tmp_path: Path, corpus: list[str]) -> None:
    """A tokenizer.json as Gemma's: SentencePiece's vocabulary without its scores."""
    sp: Any = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(add_dummy_prefix=False))
    pieces = [sp.id_to_piece(i) for i in range(sp.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = sorted(
        (
            (-sp.get_score(vocab[piece]), piece[:cut], piece[cut:])
            for piece in pieces
            if not sp.is_byte(vocab[piece]) and not sp.is_control(vocab[piece]) and len(piece) > 1
            for cut in range(1, len(piece))
            if piece[:cut] in vocab and piece[cut:] in vocab
        ),
    )
    model = models.BPE(vocab, [(a, b) for _, a, b in merges], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = normalizers.Replace(" ", "▁")
    pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
    pipeline.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    pipeline.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    metadata = tokenizer_metadata(tmp_path, vocab_size=len(vocab))
    assert metadata["tokenizer.ggml.model"] == "llama" and not metadata["tokenizer.ggml.add_space_prefix"]
    check(tmp_path, metadata, corpus, "alpha beta don't 12")


def test_what_gguf_cannot_say_is_refused(tmp_path: Path, golden: Golden) -> None:
    pipeline = byte_bpe(tmp_path, golden, pre="gpt-2")
    size = pipeline.get_vocab_size()
    with pytest.raises(TokenizerError, match="beyond the embedding's 10 rows"):
        tokenizer_metadata(tmp_path, vocab_size=10)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[aeiou]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pipeline.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="cannot be written as GGUF: no pre-tokenizer that GGUF names"):
        tokenizer_metadata(tmp_path, vocab_size=size)
    byte_bpe(tmp_path, golden, pre="gpt-2").save(str(tmp_path / "tokenizer.json"))
    lower = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    lower.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    lower.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="would get other ids") as caught:
        tokenizer_metadata(tmp_path, vocab_size=size)
    assert "\n" not in str(caught.value)
    with pytest.raises(TokenizerError, match="no tokenizer found"):
        tokenizer_metadata(tmp_path / "none", vocab_size=size)
