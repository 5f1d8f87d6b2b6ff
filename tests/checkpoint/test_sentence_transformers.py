"""What sentence-transformers keeps beside a model that scores pairs of texts by tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax.checkpoint import open_checkpoint
from llmjax.engine.front.token_labels import with_token_labels
from llmjax.errors import CheckpointError
from llmjax.models.layers.pooling import TextPrompt
from tests.checkpoints import GOLDEN, POOLED

LLAMA = GOLDEN / "llama"
F32 = np.dtype(np.float32)
LABELS = "head.0.dense.weight"


def write(folder: Path, score: Any, settings: Any = None) -> Path:
    copy = folder / "model"
    shutil.copytree(LLAMA, copy)
    prefix = "sentence_transformers"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{prefix}.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_LogitScore",
            "type": f"{prefix}.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    (copy / "1_LogitScore").mkdir()
    (copy / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    (copy / "modules.json").write_text(json.dumps(modules))
    (copy / "config_sentence_transformers.json").write_text(json.dumps(settings or {}))
    return copy


def test_the_score_is_a_difference_of_two_rows_of_the_head(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "Judge"}, "default_prompt_name": "query"}
    folder = write(tmp_path, {"true_token_id": 9, "false_token_id": 7}, settings)
    opened = open_checkpoint(folder)
    pooler = opened.model_config().pooler
    assert pooler is not None and (pooler.task, pooler.kind, pooler.activation) == ("classify", "last", "sigmoid")
    assert len(pooler.labels) == 1 and opened.logit_score is not None and opened.logit_score.instruction == "Judge"
    checkpoint = with_token_labels(opened)
    head = opened.tensors["lm_head.weight"].read(F32)
    np.testing.assert_array_equal(checkpoint.tensors[LABELS].read(F32), head[9:10] - head[7:8])
    assert checkpoint.tensors[LABELS].shape == (1, 32) and "lm_head.weight" not in checkpoint.tensors
    # As a model that generates, and as one of embeddings.
    assert open_checkpoint(folder, runner="generate").model_config().pooler is None
    embeds = open_checkpoint(folder, convert="embed", runner="pooling").model_config().pooler
    assert embeds is not None and embeds.task == "embed"


def test_or_the_logit_of_one_token(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        {"true_token_id": 9, "false_token_id": None},
        {"activation_fn": "torch.nn.modules.linear.Identity"},
    )
    # The model's embedding is its head, too.
    opened = open_checkpoint(folder, overrides={"tie_word_embeddings": True})
    pooler = opened.model_config().pooler
    assert pooler is not None and pooler.activation == "identity"
    rows = with_token_labels(opened).tensors[LABELS].read(F32)
    np.testing.assert_array_equal(rows, opened.tensors["model.embed_tokens.weight"].read(F32)[9:10])


def test_what_is_wrong_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path, {"true_token_id": 96, "false_token_id": 7})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has no row 96"):
        with_token_labels(open_checkpoint(folder))
    for wrong, message in (
        ({"true_token_id": "yes"}, "must be ids of tokens"),
        ({"true_token_id": 9, "module_input_name": "hidden"}, "module_input_name = 'hidden' is not supported"),
    ):
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"labels' matrix \(score.weight\) is missing; if tokens are the labels, as in Qwen3-Reranker, set hf_"),
        ({"classifier_from_token": ["no", "yes"]}, "method = None is not supported"),
        ({"classifier_from_token": ["no"], "method": "from_2_way_softmax"}, "must be two tokens"),
        ({"classifier_from_token": "no"}, "must be a list of tokens"),
        ({"is_original_qwen3_reranker": True}, "is_original_qwen3_reranker = True is not supported"),
    ],
)
def test_labels_that_are_nowhere(keys: dict[str, Any], message: str) -> None:
    overrides = {"architectures": ["LlamaForSequenceClassification"], **keys}
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(LLAMA, overrides=overrides, runner="pooling").model_config()


LLAMA_MEAN = POOLED / "llama-mean"
MATRIX = "2_Dense/config.json"


def with_modules(folder: Path, order: list[str], file: str = "", keys: dict[str, Any] | None = None) -> Path:
    """A model of embeddings whose modules stand in another order, with other keys in one of their files."""
    copy = folder / "model"
    shutil.copytree(LLAMA_MEAN, copy)
    known = {module["type"].rpartition(".")[2]: module for module in json.loads((copy / "modules.json").read_text())}
    other = {"type": "sentence_transformers.models.LayerNorm", "path": "3_LayerNorm"}
    (copy / "modules.json").write_text(json.dumps([known.get(name, other) for name in order]))
    if file:
        values = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps({**values, **(keys or {})}))
    return copy


WHOLE = ["Transformer", "Pooling", "Dense", "Normalize"]
ONE_MODE = {"pooling_mode_mean_tokens": False}


@pytest.mark.parametrize(
    ("order", "file", "keys", "message"),
    [
        (["Transformer", "Dense", "Pooling"], "", {}, "module 'Dense' before 'Pooling' is not supported"),
        (["Transformer", "Pooling", "Normalize", "Dense"], "", {}, "module 'Dense' after 'Normalize' is not"),
        ([*WHOLE, "LayerNorm"], "", {}, "module 'LayerNorm' is not supported"),
        (WHOLE, MATRIX, {"module_input_name": "token_embeddings"}, "module_input_name = 'token_embeddings' is not"),
        (WHOLE, MATRIX, {"activation_function": "torch.nn.modules.activation.Mish"}, "activation_function 'Mish' is"),
        (WHOLE, "1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, r"pooling_mode = .*'cls', 'mean'.* is not"),
        (
            WHOLE,
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            "mean_tokens and pooling_mode_max_tokens is",
        ),
        (
            WHOLE,
            "1_Pooling/config.json",
            {**ONE_MODE, "pooling_mode_max_tokens": True},
            "pooling_mode_max_tokens is not",
        ),
        (WHOLE, "1_Pooling/config.json", ONE_MODE, "no pooling mode is not supported"),
        (WHOLE, "1_Pooling/config.json", {"include_prompt": False}, "include_prompt = false is not supported"),
        (WHOLE, "config_sentence_transformers.json", {"default_prompt_name": "q"}, "'q' is not among the prompts"),
    ],
)
def test_modules_that_would_make_other_vectors(
    order: list[str], file: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(with_modules(tmp_path, order, file, keys))


def test_matrices_without_pooling_are_of_each_token(tmp_path: Path) -> None:
    marks = {"prompts": {"query": "Find: ", "title": "T: "}, "query_prefix": "[Q] ", "document_prefix": "[D] "}
    settings = "config_sentence_transformers.json"
    opened = open_checkpoint(with_modules(tmp_path, ["Transformer", "Dense"], settings, marks))
    pooler = opened.model_config().pooler
    assert pooler is not None and (pooler.kind, pooler.normalize, len(pooler.dense)) == ("each", True, 1)
    assert opened.modules is not None and opened.modules.prompts == {
        "title": TextPrompt(before="T: "),
        "query": TextPrompt(second="[Q] "),
        "document": TextPrompt(second="[D] ", skipped=tuple("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")),
    }
    (tmp_path / "model" / settings).write_text(json.dumps({"query_prefix": 7}))
    with pytest.raises(CheckpointError, match="query_prefix must be a text"):
        open_checkpoint(tmp_path / "model")


def test_modules_in_newer_words(tmp_path: Path) -> None:
    keys = {**ONE_MODE, "pooling_mode": "lasttoken", "include_prompt": True}
    pooler = open_checkpoint(with_modules(tmp_path, WHOLE, "1_Pooling/config.json", keys)).model_config().pooler
    assert pooler is not None and (pooler.kind, pooler.normalize, len(pooler.dense)) == ("last", True, 1)
