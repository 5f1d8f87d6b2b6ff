"""Opening folders in Hugging Face's layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.checkpoint import EMBEDDING, HEAD
from llmjax.checkpoint.inspection import inspect_model
from llmjax.errors import CheckpointError
from llmjax.quantization.gguf_export import export_gguf
from tests.checkpoints import GOLDEN

pytestmark = pytest.mark.smoke

LLAMA = GOLDEN / "llama"
F32 = np.dtype(np.float32)
WEIGHTS = {f"w{i}": np.full((2, 3), i, np.float32) for i in range(4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4}))
    return tmp_path


def shard(folder: Path, weight_map: Any, **files: dict[str, np.ndarray]) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_one_file(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(str(folder), overrides={"rope_theta": 5.0})
    assert checkpoint.path == folder and checkpoint.gguf is None
    assert checkpoint.config == {"model_type": "llama", "rope_theta": 5.0}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert set(checkpoint.tensors) == set(WEIGHTS)
    assert np.array_equal(checkpoint.tensors["w2"].read(F32), WEIGHTS["w2"])


def test_a_missing_head_is_an_error_unless_the_embedding_is_tied(tmp_path: Path) -> None:
    tensors = {name: value for name, value in load_file(LLAMA / "model.safetensors").items() if name != HEAD}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((LLAMA / "config.json").read_text())
    for said in ({"tie_word_embeddings": False}, {}):  # not tied is also what a Llama's config means that does not say
        config.pop("tie_word_embeddings", None)
        (tmp_path / "config.json").write_text(json.dumps(config | said))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing, and tie_word_embeddings is false"):
            open_checkpoint(tmp_path).model_config()
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            export_gguf(open_checkpoint(tmp_path), tmp_path / "model.gguf", scheme="f32")
        assert "tensor lm_head.weight is missing" in str(inspect_model(tmp_path).problem)
    tied = open_checkpoint(tmp_path, overrides={"tie_word_embeddings": True})
    assert tied.model_config().tie_word_embeddings


def test_a_head_of_its_own_is_used_though_the_embedding_is_said_to_be_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint as transformers 5 writes it; files made of torch's hold the same numbers twice."""
    tensors = load_file(LLAMA / "model.safetensors")
    config = json.loads((LLAMA / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for head, tied in ((tensors[EMBEDDING], True), (tensors[HEAD], False)):
        caplog.clear()
        save_file(tensors | {HEAD: head}, tmp_path / "model.safetensors")
        assert open_checkpoint(tmp_path).model_config().tie_word_embeddings == tied
        assert ("lm_head.weight is used, though" in caplog.text) != tied


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (True, None), (None, True)])
def test_multimodal_models_are_tied_if_either_config_says_so(
    tmp_path: Path, outer: bool | None, inner: bool | None
) -> None:
    """Transformers 5 writes its own word into the outer one; a head that is there is used in any case."""
    tensors = load_file(LLAMA / "model.safetensors")
    text = json.loads((LLAMA / "config.json").read_text()) | {"model_type": "mistral", "tie_word_embeddings": inner}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": outer, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"model_type": "mistral3"}))
    for names, tied in ((tensors.keys() - {HEAD}, True), (tensors.keys(), False)):
        save_file({f"language_model.{name}": tensors[name] for name in names}, tmp_path / "model.safetensors")
        assert open_checkpoint(tmp_path).model_config().tie_word_embeddings == tied


def test_a_model_that_is_not_supported_is_an_error_that_names_the_file(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")
    unknown = open_checkpoint(folder, overrides={"model_type": "novel"})
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(folder))}: config.json: model_type 'novel'"):
        unknown.model_config()
    with pytest.raises(CheckpointError, match=r"model_type 'novel' is not supported"):
        export_gguf(unknown, folder / "model.gguf", scheme="f32")
    assert not (folder / "model.gguf").exists()


def test_shards(folder: Path) -> None:
    first, second = {"w0": WEIGHTS["w0"], "w1": WEIGHTS["w3"]}, {"w1": WEIGHTS["w1"], "w2": WEIGHTS["w2"]}
    shard(folder, {"w0": "a.safetensors", "w1": "b.safetensors"}, a=first, b=second)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation_config == {}
    assert set(checkpoint.tensors) == {"w0", "w1", "w2"}  # w2 is in no index, but it is there
    for name, tensor in checkpoint.tensors.items():
        assert np.array_equal(tensor.read(F32), WEIGHTS[name])


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w0": "a.safetensors", "w9": "a.safetensors"}, r"a.safetensors: has no tensor 'w9'"),
        ({"w0": "b.safetensors"}, r"b.safetensors: is missing, but model.safetensors.index.json names it"),
        ({"w0": "../a.safetensors"}, "which is not a file name"),
        ({"w0": "/etc/passwd"}, "which is not a file name"),
        ({"w0": ".."}, "which is not a file name"),
        ({"w0": ""}, "which is not a file name"),
        ({"w0": 3}, "which is not a file name"),
        ({}, "weight_map is missing or empty"),
        (["a"], "weight_map is missing or empty"),
    ],
)
def test_wrong_index(folder: Path, weight_map: Any, message: str) -> None:
    shard(folder, weight_map, a={"w0": WEIGHTS["w0"]})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "is not a JSON object"),
        ("[" * 100_000, "is not valid JSON"),
        (None, "cannot be read"),
    ],
)
def test_wrong_config(folder: Path, content: str | None, message: str) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"config.json: {message}"):
        open_checkpoint(folder)


def test_path_that_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_an_architecture_that_is_said_to_be_another_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["NovelForCausalLM"], "vocab_size": 7}))
    read = open_checkpoint(folder, overrides={"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True})
    assert read.model_config().architecture == "LlamaForCausalLM"
    assert f"{folder} is read as ['LlamaForCausalLM'], as hf_overrides has it" in caplog.text
    with pytest.raises(CheckpointError, match=r'set hf_overrides to \{"architectures": '):
        open_checkpoint(folder).model_config()


@pytest.mark.parametrize("layout", ["before Transformers 5", "since"])
@pytest.mark.parametrize(("name", "outer"), [("gemma3", "Gemma3"), ("mistral", "Mistral3")])
def test_a_text_model_inside_of_a_multimodal_one(tmp_path: Path, layout: str, name: str, outer: str) -> None:
    alone = open_checkpoint(LLAMA.parent / name)
    text = json.loads((LLAMA.parent / name / "config.json").read_text())
    del text["architectures"]
    eos = text.pop("eos_token_id")
    outside = {"architectures": [f"{outer}ForConditionalGeneration"], "eos_token_id": eos, "image_token_index": 9}
    (tmp_path / "config.json").write_text(json.dumps({**outside, "text_config": text, "vision_config": {}}))

    def inside(key: str) -> str:
        if layout == "since":
            return re.sub(r"^model\.", "model.language_model.", key)
        return f"language_model.{key}"

    stored = {inside(key): tensor.read(F32) for key, tensor in alone.tensors.items()}
    save_file(stored | {"vision_tower.layers.0.weight": np.ones(3, F32)}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert found.model_config() == alone.model_config()
    assert found.tensors.keys() - alone.tensors.keys() == {"vision_tower.layers.0.weight"}
    for key, tensor in alone.tensors.items():
        np.testing.assert_array_equal(found.tensors[key].read(F32), tensor.read(F32))


def test_what_is_inside_of_a_multimodal_model_is_known_or_not(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "novel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'Mistral3ForConditionalGeneration' is not supported"):
        open_checkpoint(tmp_path).model_config()
