"""Models that make a vector of each token, so that texts and pages are compared by all of them (late interaction)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmjax.checkpoint.files import object_if_there
from llmjax.checkpoint.sentence_transformers import SentenceModules
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models.layers.pooling import DOCUMENT, PUNCTUATION, QUERY, Dense, TextPrompt
from llmjax.models.nested import unwrapped_name

T = TypeVar("T", bound=StoredTensor)

COLBERT = "HF_ColBERT"
COLBERT_FILE = "artifact.metadata"
"""What ColBERT's own training writes beside a model: https://github.com/stanford-futuredata/ColBERT."""
MARKS = {QUERY: ("query_token_id", "[unused0]"), DOCUMENT: ("doc_token_id", "[unused1]")}
"""Its keys of the tokens that stand before texts of each kind, and what missing keys mean."""


PROCESSOR, TOKENIZER = "processor_config.json", "tokenizer_config.json"
AUGMENTING = 10  # tokens of padding after a query, which have vectors too


@dataclass(frozen=True)
class _Asked:
    """How a processor of transformers writes a query: a text, tokens of padding, and a line break.

    Attributes:
        prefix: what a missing ``query_prefix`` means.
        begun: whether the token that begins texts stands before it.
    """

    prefix: str
    begun: bool


ASKED = {"ColPaliForRetrieval": _Asked("Question: ", True), "ColQwen2ForRetrieval": _Asked("Query: ", False)}


def token_modules(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, T]
) -> tuple[SentenceModules | None, dict[str, T]]:
    """What follows the layers of a model whose matrix for tokens is among its own tensors.

    Args:
        folder: the checkpoint.
        config: its whole config.json.
        stored: its tensors, by their names in files.

    Returns:
        The modules, or None: its tokens have no vectors of their own; and the tensors that are not theirs, by the names
        that they have where a model is not inside another.

    Raises:
        CheckpointError: a file is malformed, or the matrix is missing.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture == COLBERT:
        matrix, prompts, default = "linear", _marks(folder), None
    elif architecture in ASKED:
        matrix, prompts, default = "embedding_proj_layer", _questions(folder, ASKED[architecture]), QUERY
    else:
        return None, dict(stored)
    found = {name.rpartition(".")[2]: tensor for name, tensor in stored.items() if name.rpartition(".")[0] == matrix}
    others = {unwrapped_name(name): one for name, one in stored.items() if name.rpartition(".")[0] != matrix}
    if "weight" not in found or len(found["weight"].shape) != 2:
        raise CheckpointError(
            f"{folder}: tensor {matrix}.weight, which makes vectors of tokens, is missing or no matrix"
        )
    modules = SentenceModules(
        kind="each",
        normalize=True,
        dense=(Dense(size=found["weight"].shape[0], bias="bias" in found),),
        tensors={f"head.0.dense.{part}": tensor for part, tensor in found.items()},
        prompts=prompts,
        default_prompt=default,
    )
    return modules, others


def _marks(folder: Path) -> dict[str, TextPrompt]:
    values = object_if_there(folder / COLBERT_FILE)
    marks = {name: values.get(key, missing) for name, (key, missing) in MARKS.items()}
    if wrong := next((name for name, mark in marks.items() if not isinstance(mark, str)), None):
        raise CheckpointError(f"{folder / COLBERT_FILE}: {MARKS[wrong][0]} must be a token")
    skipped = PUNCTUATION if values.get("mask_punctuation", True) else ()
    return {name: TextPrompt(second=mark, skipped=skipped * (name == DOCUMENT)) for name, mark in marks.items()}


def _questions(folder: Path, asked: _Asked) -> dict[str, TextPrompt]:
    """Queries as a processor writes them, and documents that are texts as they are."""
    prefix = object_if_there(folder / PROCESSOR).get("query_prefix") or asked.prefix
    if not isinstance(prefix, str):
        raise CheckpointError(f"{folder / PROCESSOR}: query_prefix must be a text")
    tokens = object_if_there(folder / TOKENIZER)
    first = _token(tokens, "bos_token", folder) if asked.begun else ""
    after = f"{_token(tokens, 'pad_token', folder) * AUGMENTING}\n"
    return {QUERY: TextPrompt(before=first + prefix, after=after, complete=True), DOCUMENT: TextPrompt()}


def _token(tokens: Mapping[str, Any], key: str, folder: Path) -> str:
    found = tokens.get(key)
    text = found.get("content") if isinstance(found, Mapping) else found
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{folder / TOKENIZER}: {key} is missing, which stands in queries")
    return text
