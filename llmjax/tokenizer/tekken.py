"""Mistral's tekken.json: byte-pair ranks as in tiktoken, special tokens in front.

Format: mistralai/mistral-common, ``tokens/tokenizers/tekken.py``.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from llmjax.errors import TokenizerError
from llmjax.tokenizer.backend import HuggingFaceBackend
from llmjax.tokenizer.chat_template import ChatTemplate
from llmjax.tokenizer.pieces import ByteLevelPieces
from llmjax.tokenizer.ranks import byte_pairs, checked
from llmjax.tokenizer.tokenizer import SpecialTokens, Tokenizer

_NAMES = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
# What the first ids mean in files that do not say, which files of later versions than 7 have to.
_UNNAMED = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
_LAST_UNNAMED_VERSION = 7


def tokenizer_from_tekken(path: Path, *, chat_template: ChatTemplate | None = None) -> Tokenizer:
    """The tokenizer in a tekken.json; BOS goes in front of a text.

    Raises:
        TokenizerError: the file cannot be read, or lacks what is needed.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        config = data["config"]
        count = int(config["default_num_special_tokens"])
        ranks = _ranks(data["vocab"][: int(config["default_vocab_size"]) - count])
        special = _special_tokens(_special_entries(data), count)
        pattern = Regex(config["pattern"])
    except OSError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except Exception as error:  # JSON, base64 and Regex (plain Exception) each have their own
        raise TokenizerError(f"{path}: malformed ({type(error).__name__}: {' '.join(str(error).split())})") from error
    vocabulary, merges = byte_pairs(ranks, first=count)
    pipeline = tokenizers.Tokenizer(models.BPE(vocabulary | special, merges, ignore_merges=True))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    ids = {name: special.get(text) for name, text in _NAMES.items()}
    if (bos := ids["bos"]) is not None:
        bos_token: dict[str, Any] = {"id": "bos", "ids": [bos], "tokens": [_NAMES["bos"]]}
        pipeline.post_processor = processors.TemplateProcessing(single=["bos", "$A"], special_tokens=[bos_token])
    return Tokenizer(
        HuggingFaceBackend(pipeline),
        ByteLevelPieces(),
        special=SpecialTokens(
            bos=bos,
            eos=ids["eos"],
            pad=ids["pad"],
            end_ids=frozenset(i for i in [ids["eos"]] if i is not None),
            all_ids=frozenset(special.values()),
            texts={f"{name}_token": text for name, text in _NAMES.items() if text in special},
        ),
        chat_template=chat_template,
    )


def _ranks(entries: list[dict[str, Any]]) -> dict[bytes, int]:
    ranks = {base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"]) for entry in entries}
    return checked(ranks, len(entries))


def _special_entries(data: dict[str, Any]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] | None = data.get("special_tokens")
    if entries is not None:
        return entries
    version = str(data["config"].get("version"))
    if not version.startswith("v") or int(version[1:]) > _LAST_UNNAMED_VERSION:
        raise ValueError(f"special_tokens is missing, and version {version!r} has no default ones")
    return [{"rank": rank, "token_str": text} for rank, text in enumerate(_UNNAMED)]


def _special_tokens(entries: list[dict[str, Any]], count: int) -> dict[str, int]:
    """Texts to ids; ids that the file leaves free get the filler names of mistral-common."""
    names = {int(entry["rank"]): str(entry["token_str"]) for entry in entries}
    if not all(0 <= rank < count for rank in names) or len(set(names.values())) != len(entries):
        raise ValueError("special_tokens has a rank twice or out of range")
    return {names.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(count)}
