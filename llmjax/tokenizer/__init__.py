"""Tokenizers, incremental detokenizers and chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmjax.errors import TokenizerError
from llmjax.tokenizer.chat_template import ChatTemplate
from llmjax.tokenizer.detokenizer import IncrementalDetokenizer
from llmjax.tokenizer.gguf import tokenizer_from_gguf
from llmjax.tokenizer.huggingface import SENTENCEPIECE_FILES, tokenizer_from_folder
from llmjax.tokenizer.tokenizer import SpecialTokens, Tokenizer

if TYPE_CHECKING:
    from llmjax.checkpoint.gguf.file import GGUFFile

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "SpecialTokens", "Tokenizer", "load_tokenizer"]


def load_tokenizer(path: Path | str, *, gguf: GGUFFile | None = None, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: a folder as on Hugging Face, one of its tokenizer files, or a .gguf file.
        gguf: the file at ``path``, if it is open already.
        chat_template: instead of the model's: Jinja source, a file, or the name of a built-in template.

    Raises:
        TokenizerError: there is no tokenizer, or it is malformed or of an unknown kind; names the file and key.
    """
    path = Path(path)
    template = None if chat_template is None else ChatTemplate.from_setting(chat_template)
    if gguf is None and path.suffix == ".gguf":
        # Only GGUF files need the reader.
        from llmjax.checkpoint.gguf.file import GGUFFile

        gguf = GGUFFile.open(path)
    if gguf is not None:
        return tokenizer_from_gguf(gguf.metadata, source=str(path), chat_template=template)
    if (
        path.name in ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", *SENTENCEPIECE_FILES)
        and path.is_file()
    ):
        path = path.parent
    if not path.is_dir():
        raise TokenizerError(f"{path}: is neither a folder nor a .gguf file")
    return tokenizer_from_folder(path, chat_template=template)
