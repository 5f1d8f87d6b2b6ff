"""Golden token ids by llama.cpp. Run: python make_golden.py [smollm2.gguf gemma3.gguf]

Needs the packages gguf, tokenizers, sentencepiece, mistral-common and xllamacpp==2026.10.11549 (llama.cpp with its C
interface).
Writes
    byte_bpe.json   a small byte-level vocabulary and, for every pre-tokenizer, the ids of corpus.json
    spm.json, word_piece.json   the same for a small SentencePiece BPE with a space prefix and a small WordPiece
    gemma4.json   the same for a small BPE over characters with byte tokens, with and without merges of line ends
    characters.json   the ids of corpus.json under the second of these vocabularies, by other pre-tokenizers
    words.json   the same as spm.json for a small BPE over the characters of words, lower-cased or not
    tekken.json   the special tokens that mistral-common gives to a file that names none
    smollm2.json, gemma3.json   the ids of corpus.json under the vocabularies of the two real models
The small vocabulary is trained without any pre-tokenizer, so that its merges run across words, numbers and line
ends, and a split in another place gives other ids.
"""

import ctypes
import hashlib
import importlib.resources
import io
import json
import sys
import tempfile
from pathlib import Path

import gguf
import sentencepiece
import tokenizers
import xllamacpp.xllamacpp
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

HERE = Path(__file__).parent
LIB = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
PRE_NAMES = [
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
    "seed-coder",
    "minicpm5",
    "spark2_5",
    "ufakzeka",
]
OF_CHARACTERS = ["granite-embed-multi-311m", "sarvam-moe"]


def corpus() -> list[str]:
    entries = json.loads((HERE / "corpus.json").read_text())
    return [entry if isinstance(entry, str) else entry["repeat"] * entry["times"] for entry in entries]


class ModelParams(ctypes.Structure):
    """``llama_model_params`` of that version."""

    _fields_ = [
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    ]


LIB.llama_model_default_params.restype = ModelParams
LIB.llama_model_load_from_file.restype = ctypes.c_void_p
LIB.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
LIB.llama_model_get_vocab.restype = ctypes.c_void_p
LIB.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
LIB.llama_tokenize.argtypes = [
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int32),
    ctypes.c_int32,
    ctypes.c_bool,
    ctypes.c_bool,
]


class LlamaCpp:
    def __init__(self, path: Path) -> None:
        params = LIB.llama_model_default_params()
        params.vocab_only = True
        model = LIB.llama_model_load_from_file(str(path).encode(), params)
        assert model, path
        self.vocab = LIB.llama_model_get_vocab(model)

    def ids(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 16))()
        count = LIB.llama_tokenize(self.vocab, data, len(data), out, len(out), add_special, parse_special)
        assert count >= 0
        return list(out[:count])

    def golden(self) -> dict[str, list[list[int] | str]]:
        return {
            "ids": compact([self.ids(text) for text in corpus()]),
            "plain": compact([self.ids(text, add_special=False, parse_special=False) for text in corpus()]),
        }


def small_vocabulary() -> tuple[list[str], list[str]]:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1400,
        min_frequency=1,
        max_token_length=10,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    short = [text for text in corpus() if len(text) < 300]
    tokenizer.train_from_iterator(short, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def small_sentencepiece() -> dict[str, object]:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([t for t in corpus() if len(t) < 300]),
        model_writer=out,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        user_defined_symbols=["<|im_start|>", "<mask>"],
        control_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    pieces = [sp.id_to_piece(i) for i in range(len(sp))]

    def type_of(i: int) -> int:
        user = pieces[i] in ("<|im_start|>", "<mask>")
        return 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 4 if user else 1

    types = [type_of(i) for i in range(len(sp))]
    return {
        "model": "llama",
        "tokens": pieces,
        "scores": [sp.get_score(i) for i in range(len(sp))],
        "token_type": types,
    }


def small_word_piece() -> dict[str, object]:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += ["▁" + c for c in "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-:;()/<>$%#@中文你好é"]
    words += [
        *"abcdefghijklmnopqrstuvwxyz0123456789",
        "▁hello",
        "▁world",
        "▁lorem",
        "▁ip",
        "sum",
        "ing",
        "▁the",
        "▁cafe",
    ]
    ids = {"cls_token_id": 2, "bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}
    return {"model": "bert", "tokens": words, "token_type": [3, 2, 3, 3, 3] + [1] * (len(words) - 5), **ids}


def small_gemma4(*, newline_merges: bool) -> dict[str, object]:
    """Lines are merged as a whole, so that a split at spaces gives other ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\n+"), "isolated")
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=1,
        max_token_length=12,
        limit_alphabet=150,
        show_progress=False,
        special_tokens=[*control, "<|im_start|>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    # Without NUL, which ends the text of a token in C.
    texts = [text.replace("\0", "") for text in corpus() if len(text) < 300]
    texts += [f"a{chr(10) * n}b" for n in range(2, 9)]
    tokenizer.train_from_iterator(texts * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(pair) for pair in model["merges"] if newline_merges or "\n" not in "".join(pair)]
    types = [3] * len(control) + [4] + [6] * 256
    return {
        "model": "gemma4",
        "pre": "gemma4",
        "tokens": tokens,
        "merges": merges,
        "token_type": types + [1] * (len(tokens) - len(types)),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
    }


def small_words() -> dict[str, object]:
    """Words that white space alone ends, so that another split gives other ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    control = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        min_frequency=1,
        max_token_length=8,
        limit_alphabet=120,
        show_progress=False,
        special_tokens=control,
    )
    texts = [text.replace("\0", "") for text in corpus() if len(text) < 300]
    tokenizer.train_from_iterator([*texts, *(text.lower() for text in texts)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "whitespace",
        "pre": "whitespace",
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": [3] * len(control) + [1] * (len(tokens) - len(control)),
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "padding_token_id": 1,
    }


def unnamed_special_tokens() -> list[str]:
    data = importlib.resources.files("mistral_common") / "data" / "tekken_240911.json"
    tekken = Tekkenizer.from_file(str(data))
    return [tekken.id_to_piece(i) for i in range(24)]


def write_gguf(path: Path, vocabulary: dict[str, object]) -> None:
    writer = gguf.GGUFWriter(path, "bert" if vocabulary["model"] == "bert" else "llama")
    for key, value in vocabulary.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_array(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def compact(golden: list[list[int]]) -> list[list[int] | str]:
    """Long lists as the hash of their numbers."""
    return [ids if len(ids) <= 100 else hashlib.sha256(repr(ids).encode()).hexdigest() for ids in golden]


def save(name: str, content: object) -> None:
    (HERE / name).write_text(json.dumps(content, separators=(",", ":")) + "\n")


def main() -> None:
    tokens, merges = small_vocabulary()
    types = [3, 3, 3] + [1] * (len(tokens) - 3)
    bpe = {
        "model": "gpt2",
        "tokens": tokens,
        "merges": merges,
        "token_type": types,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        by_pre = {}
        for pre in PRE_NAMES:
            write_gguf(path, {**bpe, "pre": pre})
            by_pre[pre] = LlamaCpp(path).golden()["ids"]
        save("byte_bpe.json", {"vocabulary": bpe, "ids": by_pre})
        for name, vocabulary in (("spm", small_sentencepiece()), ("word_piece", small_word_piece())):
            write_gguf(path, vocabulary)
            save(f"{name}.json", {"vocabulary": vocabulary, **LlamaCpp(path).golden()})
        cases = []
        for newline_merges in (True, False):
            vocabulary = small_gemma4(newline_merges=newline_merges)
            write_gguf(path, vocabulary)
            cases.append({"vocabulary": vocabulary, **LlamaCpp(path).golden()})
        save("gemma4.json", cases)
        by_pre = {}
        for pre in OF_CHARACTERS:
            write_gguf(path, {**vocabulary, "model": "gpt2", "pre": pre})
            by_pre[pre] = LlamaCpp(path).golden()
        save("characters.json", by_pre)
        vocabulary, cases = small_words(), []
        for lowercase in (False, True):
            write_gguf(path, {**vocabulary, "normalizer.lowercase": lowercase})
            cases.append(LlamaCpp(path).golden())
        save("words.json", {"vocabulary": vocabulary, "cases": cases})
    save("tekken.json", unnamed_special_tokens())
    for path in map(Path, sys.argv[1:]):
        save(path.with_suffix(".json").name, LlamaCpp(path).golden())


if __name__ == "__main__":
    main()
