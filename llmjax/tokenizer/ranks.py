"""tiktoken's byte-pair ranks: files of them, the classes that came with such files, and merges out of ranks.

A file has a token and its rank a line, the token's bytes in base64. Which pattern cuts a text, and what is beyond the
ranks, says the code that came with it: ChatGLM4Tokenizer (GLM-4), TikTokenTokenizer (Kimi), QWenTokenizer (Qwen). The
merges out of ranks: transformers, ``convert_slow_tokenizer.py``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from llmjax.errors import TokenizerError
from llmjax.tokenizer.pieces import byte_level_alphabet
from llmjax.tokenizer.pretokenizers import pre_tokenizer_named

RANK_FILES = ("tiktoken.model", "qwen.tiktoken")
"""Names of files that hold nothing but ranks; ``tokenizer.model`` may."""


@dataclass(frozen=True)
class RankClass:
    """What a class of tokenizers adds to its ranks.

    Attributes:
        pre: name of what cuts a text.
        special: tokens after the ranks, in order, where tokenizer_config.json need not say them.
        filler: text of ids after the ranks that tokenizer_config.json does not name; empty: there are none.
        reserved: how many ids follow the ranks.
        before: tokens in front of a text.
    """

    pre: str
    special: tuple[str, ...] = ()
    filler: str = ""
    reserved: int = 0
    before: tuple[str, ...] = ()


_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
RANK_CLASSES: Mapping[str, RankClass] = MappingProxyType(
    {
        "ChatGLM4Tokenizer": RankClass(pre="glm4", before=("[gMASK]", "<sop>")),
        "TikTokenTokenizer": RankClass(pre="kimi-k2", filler="<|reserved_token_{}|>", reserved=256),
        "QWenTokenizer": RankClass(pre="qwen2", special=_QWEN_SPECIAL),
    }
)


def is_rank_file(data: bytes) -> bool:
    """Whether content begins like a file of ranks."""
    first = data.split(b"\n", 1)[0].split()
    return len(first) == 2 and first[1].isdigit()


def pipeline_of_ranks(path: Path, kind: str, added: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    """The tokenizer in a file of ranks.

    Args:
        path: the file.
        kind: the class of tokenizers, without ``Fast``.
        added: tokens beyond the ranks by id, as tokenizer_config.json has them.

    Raises:
        TokenizerError: the file is malformed, or the class unknown; names the file.
    """
    if kind not in RANK_CLASSES:
        raise TokenizerError(
            f"{path}: is a file of ranks, but tokenizer_class {kind!r} is not one of {', '.join(RANK_CLASSES)}, "
            "so that nothing says how a text is cut; the model needs a tokenizer.json"
        )
    rank_class = RANK_CLASSES[kind]
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line.strip()]
        ranks = checked({base64.b64decode(token, validate=True): int(rank) for token, rank in lines}, len(lines))
    except OSError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except ValueError as error:  # base64's too
        raise TokenizerError(f"{path}: malformed ({' '.join(str(error).split())})") from error
    first, pre = len(ranks), pre_tokenizer_named(rank_class.pre)
    following = {first + i: text for i, text in enumerate(rank_class.special)}
    following |= {i: token.content for i, token in added.items() if i >= first}
    if rank_class.filler:
        following = {i: rank_class.filler.format(i) for i in range(first, first + rank_class.reserved)} | following
    if wrong := [i for i in added if i < first] or sorted(following.keys() - range(first, first + len(following))):
        raise TokenizerError(f"{path}: token {wrong[0]} of tokenizer_config.json does not follow its {first} ranks")
    vocabulary, merges = byte_pairs(ranks)
    pipeline = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    pipeline.normalizer, pipeline.pre_tokenizer = pre.normalizer(), pre.pre_tokenizer()
    pipeline.decoder = decoders.ByteLevel()
    plain = {text: AddedToken(text, normalized=False, special=True) for text in following.values()}
    added_by_text = {token.content: token for token in added.values()}
    pipeline.add_tokens([added_by_text.get(following[i], plain[following[i]]) for i in sorted(following)])
    if rank_class.before:
        ids = {text: pipeline.token_to_id(text) for text in rank_class.before}
        if missing := [text for text, token_id in ids.items() if token_id is None]:
            raise TokenizerError(f"{path}: {missing[0]} is not among the added tokens of tokenizer_config.json")
        pipeline.post_processor = processors.TemplateProcessing(
            single=[*rank_class.before, "$A"],
            special_tokens=[{"id": text, "ids": [token_id], "tokens": [text]} for text, token_id in ids.items()],
        )
    return pipeline


def checked(ranks: dict[bytes, int], count: int) -> dict[bytes, int]:
    """Ranks, if there is one for each token from 0 to ``count``, and all bytes are among them.

    Raises:
        ValueError: it is not so.
    """
    if sorted(ranks.values()) != list(range(count)) or not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise ValueError("vocab is not one rank for each token, all bytes among them")
    return ranks


def byte_pairs(ranks: Mapping[bytes, int], *, first: int = 0) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of byte-level BPE.

    Args:
        ranks: by token.
        first: id of rank 0.
    """
    names = {byte: char for char, byte in byte_level_alphabet().items()}
    written = {piece: "".join([names[byte] for byte in piece]) for piece in ranks}
    vocabulary = {written[piece]: rank + first for piece, rank in ranks.items()}
    return vocabulary, [(written[left], written[right]) for left, right in _merges(ranks)]


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to make a token out of two, in the order of the tokens' ranks."""
    merges = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(left, right) for left, right in splits if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges
