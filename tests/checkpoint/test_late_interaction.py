"""Checkpoints whose matrix for tokens is among the model's own tensors, in the layouts that were published."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.errors import CheckpointError
from llmjax.models.layers.pooling import TextPrompt
from tests.checkpoints import TOKEN_VECTORS

F32 = np.dtype(np.float32)


def renamed(name: str, folder: Path, rename: Callable[[str], str]) -> Path:
    """A copy of a golden checkpoint whose tensors have other names; an empty one: the tensor is left out."""
    copy = folder / name
    shutil.copytree(TOKEN_VECTORS / name, copy)
    tensors = {rename(key): tensor.read(F32) for key, tensor in stored_tensors(copy).items()}
    save_file({key: value for key, value in tensors.items() if key}, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("name", "new", "old"),
    [
        ("colqwen2", "vlm.language_model.", "vlm.model."),
        ("colpali", "vlm.vision_tower.", "vlm.vision_tower.vision_model."),
        ("colpali", "vlm.language_model.model.", "vlm.language_model."),
    ],
)
def test_names_of_other_versions(name: str, new: str, old: str, tmp_path: Path) -> None:
    opened = open_checkpoint(TOKEN_VECTORS / name)
    other = open_checkpoint(renamed(name, tmp_path, lambda key: key.replace(new, old)))
    assert opened.tensors.keys() == other.tensors.keys()
    assert opened.vision_tensors.keys() == other.vision_tensors.keys() and opened.vision_tensors
    pooler = other.model_config().pooler
    assert pooler is not None and (pooler.kind, pooler.dense[0].size, pooler.dense[0].bias) == ("each", 36, True)


def test_a_head_for_words_is_not_read(tmp_path: Path) -> None:
    folder = renamed("colpali", tmp_path, lambda key: key)
    tensors = {key: tensor.read(F32) for key, tensor in stored_tensors(folder).items()}
    head = {"vlm.language_model.lm_head.weight": np.zeros((320, 56), F32)}
    save_file({**tensors, **head}, folder / "model.safetensors")
    assert open_checkpoint(folder).tensors.keys() == open_checkpoint(TOKEN_VECTORS / "colpali").tensors.keys()


@pytest.mark.parametrize(
    ("name", "prefix", "end"),
    [("colpali", "<bos>Ask: ", "<pad>" * 10 + "\n"), ("colqwen2", "Ask: ", "<|endoftext|>" * 10 + "\n")],
)
def test_queries_are_what_the_processor_s_file_says(name: str, prefix: str, end: str, tmp_path: Path) -> None:
    folder = renamed(name, tmp_path, lambda key: key)
    (folder / "processor_config.json").write_text(json.dumps({"query_prefix": "Ask: "}))
    modules = open_checkpoint(folder).modules
    assert modules is not None and modules.default_prompt == "query"
    assert modules.prompts["query"] == TextPrompt(before=prefix, after=end, complete=True)
    (folder / "processor_config.json").write_text(json.dumps({"query_prefix": 7}))
    with pytest.raises(CheckpointError, match="query_prefix must be a text"):
        open_checkpoint(folder)
    (folder / "processor_config.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: \w+_token is missing, which stands in queries"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("name", "matrix"), [("colbert", "linear"), ("colpali", "embedding_proj_layer")])
def test_the_matrix_has_to_be_there(name: str, matrix: str, tmp_path: Path) -> None:
    folder = renamed(name, tmp_path, lambda key: "" if key.startswith(matrix) else key)
    with pytest.raises(CheckpointError, match=rf"tensor {matrix}\.weight, which makes vectors of tokens, is missing"):
        open_checkpoint(folder)


def test_marks_of_texts_are_tokens(tmp_path: Path) -> None:
    folder = renamed("colbert", tmp_path, lambda key: key)
    (folder / "artifact.metadata").unlink()
    modules = open_checkpoint(folder).modules
    assert modules is not None
    document = TextPrompt(second="[unused1]", skipped=tuple(string.punctuation))
    assert modules.prompts == {"query": TextPrompt(second="[unused0]"), "document": document}
    (folder / "artifact.metadata").write_text(json.dumps({"mask_punctuation": False}))
    modules = open_checkpoint(folder).modules
    assert modules is not None and modules.prompts["document"] == TextPrompt(second="[unused1]")
    (folder / "artifact.metadata").write_text(json.dumps({"doc_token_id": 3}))
    with pytest.raises(CheckpointError, match="doc_token_id must be a token"):
        open_checkpoint(folder)
