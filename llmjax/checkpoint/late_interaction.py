"""Models that make a vector of each token, so that texts and pages are compared by all of them (late interaction)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from llmjax.checkpoint.files import read_object
from llmjax.checkpoint.sentence_transformers import SentenceModules
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.models.layers.pooling import DOCUMENT, QUERY, Dense, TextPrompt

T = TypeVar("T", bound=StoredTensor)

COLBERT = "HF_ColBERT"
COLBERT_FILE = "artifact.metadata"
"""What ColBERT's own training writes beside a model: https://github.com/stanford-futuredata/ColBERT."""
MARKS = {QUERY: ("query_token_id", "[unused0]"), DOCUMENT: ("doc_token_id", "[unused1]")}
"""Its keys of the tokens that stand before texts of each kind, and what missing keys mean."""


def token_modules(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, T]
) -> tuple[SentenceModules | None, dict[str, T]]:
    """What follows the layers of a model whose matrix for tokens is among its own tensors.

    Args:
        folder: the checkpoint.
        config: its whole config.json.
        stored: its tensors, by their names in files.

    Returns:
        The modules, or None: its tokens have no vectors of their own; and the tensors that are not theirs.

    Raises:
        CheckpointError: a file is malformed, or the matrix is missing.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture != COLBERT:
        return None, dict(stored)
    matrix, prompts, default = "linear", _marks(folder), None
    found = {name.rpartition(".")[2]: tensor for name, tensor in stored.items() if name.rpartition(".")[0] == matrix}
    others = {name: tensor for name, tensor in stored.items() if name.rpartition(".")[0] != matrix}
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
    values = read_object(folder / COLBERT_FILE) if (folder / COLBERT_FILE).exists() else {}
    marks = {name: values.get(key, missing) for name, (key, missing) in MARKS.items()}
    if wrong := next((name for name, mark in marks.items() if not isinstance(mark, str)), None):
        raise CheckpointError(f"{folder / COLBERT_FILE}: {MARKS[wrong][0]} must be a token")
    return {name: TextPrompt(second=mark) for name, mark in marks.items()}
