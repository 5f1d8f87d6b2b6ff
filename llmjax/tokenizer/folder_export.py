"""A tokenizer as the files of a folder in Hugging Face's layout, for models that came as GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmjax.errors import TokenizerError
from llmjax.tokenizer.backend import HuggingFaceBackend, SentencePieceBackend
from llmjax.tokenizer.gguf_export import CHECK_TOKENS, first_difference
from llmjax.tokenizer.huggingface import tokenizer_from_folder
from llmjax.tokenizer.tokenizer import Tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json or tokenizer.model, and tokenizer_config.json with the chat templates.

    What is written is read back, and both must agree on texts that tokenizers disagree about.

    Args:
        tokenizer: a tokenizer from any source.
        folder: where the files go.

    Raises:
        TokenizerError: the files cannot say what the tokenizer does; names the text that would get other ids.
    """
    config: dict[str, Any] = {**tokenizer.special.texts, "clean_up_tokenization_spaces": False}
    if tokenizer.chat_template is not None:
        config["chat_template"] = _templates(dict(tokenizer.chat_template.sources))
    backend = tokenizer.backend
    if isinstance(backend, HuggingFaceBackend):
        (folder / "tokenizer.json").write_text(backend.tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    elif isinstance(backend, SentencePieceBackend):
        (folder / "tokenizer.model").write_bytes(backend.serialized())
        config |= _cut_out(backend)
    else:
        raise TokenizerError(f"a tokenizer of kind {type(backend).__name__} cannot be written to a folder")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    tokens = [tokenizer.id_to_token(i) for i in sorted(tokenizer.all_special_ids)[:CHECK_TOKENS]]
    difference = first_difference(tokenizer, tokenizer_from_folder(folder), tokens)
    if difference is not None:
        raise TokenizerError(
            f"the tokenizer cannot be written to a folder: text {difference[:60]!r} would get other ids; "
            "give the folder that the GGUF file was made from"
        )


def _templates(sources: dict[str, str]) -> str | list[dict[str, str]]:
    if sources.keys() == {"default"}:
        return sources["default"]
    return [{"name": name, "template": source} for name, source in sources.items()]


def _cut_out(backend: SentencePieceBackend) -> dict[str, Any]:
    """Tokens that are cut out of texts, and those around a text."""
    rules = backend.rules
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = {str(i): {"content": text, **flags, "special": True} for text, i in rules.special.items()}
    added |= {str(i): {"content": text, **flags, "special": False} for text, i in rules.literal.items()}
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": True,
        "add_bos_token": bool(rules.before),
        "add_eos_token": bool(rules.after),
        "added_tokens_decoder": added,
    }
