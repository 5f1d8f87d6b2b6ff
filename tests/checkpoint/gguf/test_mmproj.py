"""Encoders in files of their own, as llama.cpp's converter writes them, are read as the originals."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmjax.checkpoint.gguf import mmproj
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.projectors import PROJECTOR_TYPES, Projector
from llmjax.checkpoint.vision import vision_tensors
from llmjax.errors import CheckpointError
from llmjax.models.vision.registry import preparation_of, vision_family
from tests.checkpoint.gguf.encoder_files import CONVERSIONS, F32, V, axes_apart, written
from tests.checkpoint.gguf.golden.mtmd_cases import CASES, HERE


@pytest.mark.parametrize("name", [name for name in CONVERSIONS if CASES.get(name) and CASES[name].converted])
def test_files_have_the_tensors_that_the_converter_writes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mmproj-f32.gguf"
    written(name, path)
    found = {
        tensor.name: [list(map(int, reversed(tensor.shape))), zlib.crc32(tensor.data.astype(np.float32).tobytes())]
        for tensor in gguf.GGUFReader(path).tensors
    }
    with np.load(HERE / f"{name}.npz") as golden:
        assert found == json.loads(golden["tensors"].tobytes())


@pytest.mark.parametrize("name", CONVERSIONS)
def test_files_are_read_as_the_original(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mmproj-f32.gguf"
    original = written(name, path)
    file, projector = mmproj.opened(path)
    token, number = CONVERSIONS[name].token
    whole, processor = mmproj.whole_config(
        file, projector, text=original.text, token_id=lambda text: number if text == token else None
    )
    family = vision_family(whole)
    assert family is not None
    spec = family.encoder(family.sight(whole))
    assert spec == original.spec
    found, others = vision_tensors(*_arguments(file, projector, spec, path))
    assert not others and found.keys() == original.tensors.keys()
    for key, tensor in found.items():
        np.testing.assert_allclose(tensor.read(F32), original.tensors[key], atol=1e-6)
    made, expected = preparation_of(whole, processor), original.preparation
    assert made is not None
    np.testing.assert_allclose(made.mean + made.std, expected.mean + expected.std, rtol=1e-7)
    assert (made.layout, made.text, made.row_token, made.side) == (
        expected.layout,
        expected.text,
        expected.row_token,
        expected.side,
    )


def _arguments(file: Any, projector: Projector, spec: Any, path: Path) -> tuple[Any, ...]:
    tensors, names = mmproj.tensors(file, projector)
    return tensors, spec, names, path


def test_queries_keys_and_values_may_be_in_one(tmp_path: Path) -> None:
    """Kimi K2.5's converter moves rows of queries and keys alone."""
    projector, whole = PROJECTOR_TYPES["kimik25"], np.arange(60, dtype=np.float32)
    stored = np.concatenate([*(axes_apart(5)(part) for part in np.split(whole, 3)[:2]), whole[40:]])
    files = []
    for name, values in (("attn_qkv", stored), ("attn_q", whole[:18])):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "clip")
        for key in ("embedding_length", "feed_forward_length", "attention.head_count"):
            writer.add_uint32(f"{V}{key}", 5)
        writer.add_tensor(f"v.blk.0.{name}.bias", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(GGUFFile.open(tmp_path / f"{name}.gguf"))
    found, _ = mmproj.tensors(files[0], projector)
    np.testing.assert_array_equal(found["v.blk.0.attn_qkv.bias"].read(F32), whole)
    with pytest.raises(CheckpointError, match="has 18 rows, not 5 heads of pairs of two axes"):
        mmproj.tensors(files[1], projector)


def test_the_file_beside_a_model_is_found_if_it_is_clear_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model-Q4_K_M.gguf"
    assert mmproj.beside(model) is None
    for name in ("mmproj-model-q8_0.gguf", "mmproj-model-BF16.gguf", "mmproj-model-f16.gguf"):
        (tmp_path / name).touch()
        assert mmproj.beside(model) == tmp_path / name
    assert not caplog.records
    (tmp_path / "other-mmproj-f16.gguf").touch()
    assert mmproj.beside(model) is None
    assert "--mmproj says which encoder is its own: mmproj-model-BF16.gguf, mmproj-model-f16" in caplog.text


def test_other_files_and_kinds_are_refused(tmp_path: Path) -> None:
    for architecture, kind, words in (("llama", "gemma3", "is not an encoder"), ("clip", "ldp", "'ldp' is not supp")):
        path = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_string("clip.projector_type", kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=words):
            mmproj.opened(path)


def test_a_text_model_without_the_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    written("gemma3", path)
    with pytest.raises(CheckpointError, match="has no token '<image_soft_token>'"):
        mmproj.whole_config(*mmproj.opened(path), text={"hidden_size": 56}, token_id=lambda text: None)


def test_the_encoder_of_a_text_model_is_read_with_its_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    original = written("idefics3", path)
    tokens = [f"<{number}>" for number in range(259)]
    model = GGUFFile(tmp_path / "model.gguf", 3, {"tokenizer.ggml.tokens": [*tokens, "<image>"]}, {})
    found = mmproj.encoder_of(model, original.text)
    assert mmproj.encoder_of(model, original.text, mmproj.NONE) is None
    assert found is not None and found.whole["image_token_id"] == 259
    assert found.processor["max_image_size"] == {"longest_edge": 24}
    assert len(found.tensors) == len(original.tensors)


def test_an_encoder_beside_that_does_not_fit_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mmproj.gguf"
    original = written("idefics3", path)
    model = GGUFFile(tmp_path / "model.gguf", 3, {"tokenizer.ggml.tokens": ["a"]}, {})
    assert mmproj.encoder_of(model, original.text) is None
    assert "the text model alone is read; " in caplog.text and "has no token '<image>'" in caplog.text
    with pytest.raises(CheckpointError, match="has no token '<image>'"):
        mmproj.encoder_of(model, original.text, path)
