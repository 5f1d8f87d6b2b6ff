"""The pre-tokenizers that GGUF files name in ``tokenizer.ggml.pre``: how text is split before byte-pair merging.

Each is one or more regular expressions, applied in order, every one splitting what the one before left. They are
those of the models' own tokenizer.json files where llama.cpp approximates these (case-insensitive contractions,
letter classes), since the ids to reach are the original's.

Names and flags: ggml-org/llama.cpp, ``src/llama-vocab.cpp``; NFC: transformers' tokenizers of the same families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tokenizers import Regex, normalizers, pre_tokenizers

from llmjax.errors import TokenizerError
from llmjax.tokenizer.pieces import SPACE


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is prepared for BPE.

    Args:
        patterns: Oniguruma regular expressions; matches are pieces, and so is what lies between them.
        merged: what pieces consist of: bytes in GPT-2's letters; characters, spaces written as ▁; or characters of
            words, where matches of ``patterns`` are dropped.
        ignore_merges: a whole piece that is in the vocabulary is taken as it is.
        add_bos: whether BOS goes in front when the file does not say.
        has_bos: the family knows a BOS token at all.
        nfc: text is brought into Unicode's normal form C first.
        as_gemma4: a run of line ends that is a token is taken as it is, and BOS goes in front even where the file says
            not to, which early files of Gemma 4 did by mistake.
    """

    patterns: tuple[str, ...]
    merged: Literal["bytes", "characters", "words"] = "bytes"
    ignore_merges: bool = False
    add_bos: bool = False
    has_bos: bool = True
    nfc: bool = False
    as_gemma4: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        matches = "removed" if self.merged == "words" else "isolated"
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior=matches) for pattern in self.patterns
        ]
        if self.merged == "bytes":
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        if self.merged == "characters":
            return normalizers.Replace(" ", SPACE)
        return normalizers.NFC() if self.nfc else None


# Parts that several expressions share.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _llama3(digits: str) -> str:
    return rf"{_CONTRACTION}|{_WORD}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"


def _o200k(suffix: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _llama3(r"\p{N}{1,3}")
_QWEN2 = _llama3(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BREAKS}"
)
_O200K = _o200k(_CONTRACTION + "?", r"\p{N}{1,3}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BREAKS}",
)
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛ"
    "ὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = r"[一-龥ࠀ-一가-\uD7FF]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    # \s+$ of the original, told where a match can begin: without that a long run of spaces takes quadratic time.
    r"(?<!\s)\s++$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_SPARK = (
    *_DEEPSEEK3[:2],
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_HAN = r"[\p{Han}]+"
_KIMI_UPPER, _KIMI_LOWER = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = "|".join(
    [
        _HAN,
        rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?",
        rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}",
    ]
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# Threes of digits, counted from a run's end, where the originals look ahead from each piece: that is quadratic.
_THREES = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})+(?!\p{N}))|\p{N}{1,3}"
_THREES_OF_WORDS = r"(?<!\d)\d{1,2}(?=(?:\d{3})+\b)|\d{1,3}"
_JAIS2 = "|".join(
    [
        _llama3(r"\p{N}{1,3}").removesuffix(r"|\s+(?!\S)|\s+"),
        *(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)),
        r"\s{1,2}(?!\S)",
        r"\s",
    ]
)
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，\u3001-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    _o200k(_CONTRACTION + "?", r"\p{N}"),
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_AFMOE = (
    _THREES,
    r"[一-鿿㐀-䶿豈-﫿\u3040-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿\u0e80-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-\uD7AF\u1100-ᇿ]+",
    _DEEPSEEK3[-1],
)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)

_LLAMA3_BOS = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer(patterns=(_QWEN2,))
_PLAIN_GPT2 = PreTokenizer(patterns=(_GPT2,))
_DIGITS_GPT2 = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_GLM = PreTokenizer(patterns=(_LLAMA3,), has_bos=False)
_LINES = PreTokenizer(patterns=(r"\n+",), merged="characters")
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

_BY_NAMES: dict[tuple[str, ...], PreTokenizer] = {
    ("default", ""): PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    (
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
    ): _LLAMA3_BOS,
    ("dbrx", "smaug-bpe"): PreTokenizer(patterns=(_LLAMA3,)),
    ("chatglm-bpe",): _GLM,
    ("glm4", "glm5"): replace(_GLM, ignore_merges=True),
    ("qwen2", "deepseek-r1-qwen"): replace(_QWEN, nfc=True),
    ("megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo", "f2llmv2"): _QWEN,
    # Not in form C, unlike in transformers: the ids that llama.cpp publishes with this vocabulary are the measure.
    ("qwen35",): PreTokenizer(patterns=(_QWEN35,)),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"): PreTokenizer(patterns=(_O200K,)),
    ("tekken",): PreTokenizer(patterns=(_o200k("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    ("kimi-k2",): PreTokenizer(patterns=(_KIMI,), ignore_merges=True),
    ("deepseek-llm",): PreTokenizer(patterns=_DEEPSEEK_LLM),
    ("deepseek-coder",): PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): PreTokenizer(patterns=_DEEPSEEK3),
    ("falcon",): PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"): _DIGITS_GPT2,
    ("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "gigachat", "mellum", "exaone4", "a.x-4.0"): _PLAIN_GPT2,
    ("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "roberta-bpe", "jina-v1-en", "jina-v2-code"): _PLAIN_GPT2,
    # These descend from GPT-NeoX's tokenizer, which normalizes.
    ("olmo", "mpt", "modern-bert"): replace(_PLAIN_GPT2, nfc=True),
    ("bloom", "poro-chat", "gpt3-finnish"): PreTokenizer(patterns=(_BLOOM,)),
    ("viking",): PreTokenizer(patterns=(_BLOOM, r"\p{N}")),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer(patterns=(_BAILING,)),
    ("jais-2",): PreTokenizer(patterns=(_JAIS2,)),
    ("youtu",): PreTokenizer(patterns=_YOUTU, ignore_merges=True),
    ("exaone-moe",): PreTokenizer(patterns=(_EXAONE_MOE,)),
    ("afmoe",): PreTokenizer(patterns=_AFMOE),
    ("tiny_aya", "cohere2moe"): PreTokenizer(patterns=(_THREES_OF_WORDS, _O200K)),
    ("superbpe",): PreTokenizer(patterns=(r"\p{N}+", _THREES)),
    ("chameleon",): PreTokenizer(patterns=_CHAMELEON, add_bos=True),
    ("granite-embed-multi-97m",): PreTokenizer(patterns=(_O200K,), ignore_merges=True),
    ("laguna",): PreTokenizer(patterns=(r"[^\n]+|[\n]+", _QWEN2)),
    ("minicpm5",): PreTokenizer(patterns=(r"\p{N}{1,3}", _llama3(r"\p{N}+")), ignore_merges=True),
    ("spark2_5",): PreTokenizer(patterns=_SPARK),
    # Qwen 2's without contractions, so that the endings of Turkish words stay with their apostrophes.
    ("ufakzeka",): PreTokenizer(patterns=(_QWEN2.removeprefix(f"{_CONTRACTION}|"),)),
    ("gemma4", "granite-embed-multi-311m"): replace(_LINES, add_bos=True, as_gemma4=True),
    ("sarvam-moe",): _LINES,
    ("whitespace",): PreTokenizer(patterns=(r"\s+",), merged="words"),
    ("seed-coder",): PreTokenizer(patterns=(rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BREAKS}",)),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _BY_NAMES.items() for name in names}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """The pre-tokenizer that GGUF files call ``name``.

    Raises:
        TokenizerError: there is none of that name.
    """
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre {name!r} is not supported (known: {', '.join(filter(None, PRE_TOKENIZERS))})"
        )
    return PRE_TOKENIZERS[name]
