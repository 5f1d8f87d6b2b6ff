"""Writes ``characters/`` beside it: a tokenizer with one token a character, for the golden checkpoints of 96 tokens.

One-character tokens make stop strings and bad words of any length span tokens. Needs nothing that the tests do not:

    python tests/engine/golden/make_characters.py
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

FOLDER = Path(__file__).parent / "characters"
SPECIAL = ["<pad>", "<s>", "</s>"]  # the checkpoints' bos is 1, their eos 2
# The byte-level alphabet writes a space as Ġ.
CHARACTERS = ["Ġ", *(c for c in string.digits + string.ascii_letters + string.punctuation if c not in "`~")][:93]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    assert len(vocab) == 96
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(FOLDER / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
