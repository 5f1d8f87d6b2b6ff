"""GGUF files with random weights: of numbers of the scale that a model's have, and read by the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.random_gguf import TYPES, write_random_gguf
from benchmarks.random_model import SHAPES
from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.gguf.file import GGUFFile


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tokenizer of 40 tokens."""
    path = tmp_path_factory.mktemp("vocabulary") / "like.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(40)])
    writer.add_token_types([1] * 40)
    writer.add_bos_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("type_name", TYPES)
def test_numbers_have_the_scale_of_weights(type_name: str, vocabulary: Path, tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny"], hidden_size=256, intermediate_size=512)
    write_random_gguf(tmp_path / "random.gguf", shape, type_name=type_name, like=vocabulary)
    checkpoint = open_checkpoint(tmp_path / "random.gguf")
    assert checkpoint.config["vocab_size"] == 40 and checkpoint.config["bos_token_id"] == 3
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "random.gguf").tensors}
    assert stored["token_embd.weight"].tensor_type.name.lower() == type_name
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        values = checkpoint.tensors[name].read(np.dtype(np.float32))
        assert 0.5 < values.std() * 16 < 2 and abs(values.mean()) * 16 < 0.2  # 256 ** -0.5


def test_a_chat_template_takes_the_place_of_the_other_files(vocabulary: Path, tmp_path: Path) -> None:
    path, again = tmp_path / "random.gguf", tmp_path / "again.gguf"
    write_random_gguf(path, SHAPES["tiny"], type_name="f16", like=vocabulary, chat_template="{{ messages }}")
    assert GGUFFile.open(path).metadata["tokenizer.chat_template"] == "{{ messages }}"
    write_random_gguf(again, SHAPES["tiny"], type_name="f16", like=path, chat_template="{{ other }}")
    assert GGUFFile.open(again).metadata["tokenizer.chat_template"] == "{{ other }}"


def test_rows_that_super_blocks_do_not_divide_are_of_llama_cpps_other_type(vocabulary: Path, tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny"], hidden_size=96, intermediate_size=256)
    write_random_gguf(tmp_path / "random.gguf", shape, type_name="q4_k", like=vocabulary)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "random.gguf").tensors}
    assert tensors["blk.0.ffn_up.weight"].tensor_type is gguf.GGMLQuantizationType.Q5_0
    assert tensors["blk.0.ffn_down.weight"].tensor_type is gguf.GGMLQuantizationType.Q4_K
