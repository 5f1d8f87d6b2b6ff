"""The golden models that make vectors, with a tokenizer of words: ``w17`` is token 17."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from tests.checkpoints import POOLED

SPECIAL = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2}
VOCAB = 96


def write_with_tokenizer(name: str, folder: Path, *, ends: bool) -> Path:
    """A copy of a golden model with a tokenizer.

    Args:
        ends: [CLS] stands before a text, [SEP] after each; else texts are as they are.
    """
    copy = folder / name
    shutil.copytree(POOLED / name, copy)
    tokenizer = Tokenizer(models.WordLevel({**SPECIAL, **{f"w{i}": i for i in range(3, VOCAB)}}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, SPECIAL[token]) for token in ("[CLS]", "[SEP]")],
        )
    tokenizer.save(str(copy / "tokenizer.json"))
    (copy / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return copy


RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["w7", "w9"],
    "is_original_qwen3_reranker": True,
}


def split_prompt(tokens: np.ndarray) -> tuple[str, str, str]:
    """A template that makes a golden prompt of two texts, and these: an instruction stands second, and words between
    the texts and after them."""
    query, document = words(tokens[2:6]), words(tokens[7:-2])
    template = (
        f"{words(tokens[:1])} {{% for m in messages if m.role == 'system' %}}{{{{ m.content }}}}"
        f"{{% else %}}{words(tokens[1:2])}{{% endfor %}} "
        f"{{{{ messages[-2].content }}}} {words(tokens[6:7])} {{{{ messages[-1].content }}}} {words(tokens[-2:])}"
    )
    return template, query, document


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(POOLED / name / "golden.npz"))


def words(tokens: np.ndarray) -> str:
    return " ".join(f"w{token}" for token in tokens)


def pair(tokens: np.ndarray, types: np.ndarray) -> tuple[str, str]:
    """The two texts of a golden pair."""
    first, second = tokens[types == 0], tokens[types == 1]
    return words(first[1:-1]), words(second[:-1])
