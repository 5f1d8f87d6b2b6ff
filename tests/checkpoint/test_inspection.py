"""What files say about a model that runs, and about one that does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax.checkpoint.gguf.names import FILE_TYPES
from llmjax.checkpoint.inspection import StoredType, inspect_model
from llmjax.errors import CheckpointError
from tests.checkpoints import GOLDEN


def write_gguf(path: Path, architecture: str, *, split: int = 0, **keys: Any) -> None:
    """A GGUF file of one layer, whatever its architecture means."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_file_type(15)
    for key, value in {"block_count": 1, "context_length": 256, "embedding_length": 64, **keys}.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(name, value)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.mystery.weight"):
        writer.add_tensor(name, np.zeros((32, 64), np.float32))
    quantized = gguf.quantize(np.zeros((32, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_a_model_that_runs(name: str) -> None:
    found = inspect_model(GOLDEN / name)
    stored = load_file(GOLDEN / name / "model.safetensors")
    config = json.loads((GOLDEN / name / "config.json").read_text())
    assert (found.problem, found.container) == (None, "safetensors, 1 file")
    assert found.architecture == config["architectures"][0]
    assert found.parameters == sum(array.size for array in stored.values())
    assert found.types == [StoredType("BF16", len(stored), found.parameters, 2 * found.parameters)]
    assert found.nbytes == 2 * found.parameters
    assert found.model is not None
    assert found.model.num_layers == config["num_hidden_layers"] == found.setting("num_hidden_layers")
    assert found.quantization() is None


def test_overrides_are_seen() -> None:
    found = inspect_model(GOLDEN / "llama", overrides={"max_position_embeddings": 32}, max_model_len=16)
    assert found.model is not None
    assert found.model.max_position == 32


@pytest.mark.parametrize("change", [{"architectures": ["FancyForCausalLM"]}, {"hidden_act": "swish9"}])
def test_a_folder_that_cannot_be_run_still_tells(tmp_path: Path, change: dict[str, Any]) -> None:
    shutil.copytree(GOLDEN / "llama", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text()) | change
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    found = inspect_model(tmp_path / "m")
    assert found.model is None
    assert found.problem is not None
    assert found.problem.startswith(f"{tmp_path / 'm'}: config.json: ")
    assert found.architecture == config["architectures"][0]
    assert found.setting("max_position_embeddings") == 64
    assert found.parameters == inspect_model(GOLDEN / "llama").parameters


def test_a_folder_of_an_unknown_quantization_lists_what_is_stored(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "text_config": {"max_position_embeddings": 99},
        "quantization_config": {"quant_method": "fancy", "bits": 5},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"a.codes": np.zeros((4, 8), np.int32), "a.scales": np.zeros(6, np.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = inspect_model(tmp_path)
    assert "quant_method is 'fancy'; supported are" in (found.problem or "")
    assert found.types == [StoredType("I32", 1, 0, 128), StoredType("F16", 1, 6, 12)]
    assert found.setting("max_position_embeddings") == 99
    where = str(tmp_path / "config.json")
    assert found.quantization() == {"declared_in": f"{where}.quantization_config", "quant_method": "fancy", "bits": 5}


def test_a_gguf_file_of_an_unknown_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", "fancy", attention__head_count=4, attention__head_count_kv=[1, 2], expert_count=8)
    found = inspect_model(tmp_path / "x.gguf")
    assert found.problem is not None
    assert found.problem.startswith(
        f"{tmp_path / 'x.gguf'}: architecture 'fancy' is not supported; supported are llama"
    )
    assert (found.architecture, found.container, found.model) == ("fancy", "GGUF version 3", None)
    assert found.types == [StoredType("F32", 3, 3 * 2048, 3 * 8192), StoredType("Q8_0", 1, 2048, 34 * 64)]
    assert found.setting("max_position_embeddings") == 256
    assert found.setting("num_key_value_heads") == [1, 2]
    assert found.setting("num_experts") == 8
    assert found.quantization() == {"quant_method": "GGUF Q4_K_M"}


def test_a_split_gguf_file_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", "fancy", split=2)
    found = inspect_model(tmp_path / "x-00002-of-00002.gguf")
    assert found.container == "GGUF version 3, 2 parts"
    assert len(found.tensors) == 4


def test_file_types_are_llama_cpps() -> None:
    reference = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType}
    for number, name in FILE_TYPES.items():
        assert reference[number] == name


def test_containers_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(CheckpointError, match=r"x.gguf: tensor count needs 8 bytes"):
        inspect_model(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        inspect_model(tmp_path)
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="has neither model"):
        inspect_model(tmp_path)
