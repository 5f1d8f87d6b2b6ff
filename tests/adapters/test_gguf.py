"""GGUF adapters against the PEFT folders that they are made of, as llama.cpp's convert_lora_to_gguf.py makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmjax.adapters.adapter import Adapter
from llmjax.adapters.read import AdapterReader
from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.gguf.writer import TensorInfo, open_gguf_writer
from llmjax.errors import CheckpointError
from llmjax.quantization.gguf_export import export_gguf
from tests.checkpoints import ADAPTERS, GOLDEN

STEMS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"attn_q": 4, "attn_k": 2}
ALPHA = 8.0


def as_converted(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of a PEFT folder for a Llama as the converter has them: rows of queries and keys are permuted."""
    found = {}
    for name, values in tensors.items():
        module, _, part = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        if module == "model.embed_tokens" or ".embed_tokens.lora" in name:
            stem = "token_embd"
        else:
            layer, _, rest = module.removeprefix("model.layers.").partition(".")
            stem = f"blk.{layer}.{STEMS[rest]}"
        heads = HEADS.get(stem.rpartition(".")[2])
        if heads and part == "B":
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        found[f"{stem}.weight.lora_{part.lower()}"] = values
    return found


def write(path: Path, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    metadata = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": ALPHA,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with open_gguf_writer(path, metadata, [TensorInfo(name, one.shape, "F32") for name, one in tensors.items()]) as out:
        for name, values in tensors.items():
            out.write(name, [np.ascontiguousarray(values).view(np.uint8).reshape(-1)])
    return path


def reader(base: Checkpoint) -> AdapterReader:
    shapes = {name: tensor.shape for name, tensor in base.tensors.items() if len(tensor.shape) == 2}
    return AdapterReader(base, base.model_config(), shapes, 16)


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return load_file(ADAPTERS / name / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """The same model as a folder and as a GGUF file."""
    path = tmp_path_factory.mktemp("base") / "llama.gguf"
    folder = open_checkpoint(GOLDEN / "llama")
    export_gguf(folder, path, scheme="f32")
    return {"folder": folder, "gguf": open_checkpoint(path)}


def assert_equal(found: Adapter, expected: Adapter) -> None:
    assert found.parts.keys() == expected.parts.keys()
    for name, part in expected.parts.items():
        np.testing.assert_allclose(found.parts[name].delta(), part.delta(), atol=1e-6, err_msg=name)


@pytest.mark.parametrize("base", ["folder", "gguf"])
def test_an_adapter_is_what_its_peft_folder_is(bases: Mapping[str, Checkpoint], base: str, tmp_path: Path) -> None:
    """Whether the base stores rows in the same order or in another one."""
    expected = reader(bases["folder"]).read(ADAPTERS / "plain", "")
    path = write(tmp_path / "a.gguf", as_converted(tensors_of("plain")))
    own = reader(bases[base])
    assert_equal(own.read(path, ""), expected)
    assert_equal(own.read(ADAPTERS / "plain", ""), expected)


def test_an_alpha_of_zero_is_no_scale(bases: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    tensors = as_converted(tensors_of("plain"))
    own = reader(bases["gguf"])
    scaled = own.read(write(tmp_path / "a.gguf", tensors), "")
    plain = own.read(write(tmp_path / "b.gguf", tensors, adapter__lora__alpha=0.0), "")
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_allclose(scaled.parts[name].b, ALPHA / 4 * plain.parts[name].b)


def test_embeddings_are_transposed(bases: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    name, size = "token_embd.weight", (96, 32)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(size[0], 3)).astype(np.float32), rng.normal(size=(size[1], 3)).astype(np.float32)
    path = write(tmp_path / "a.gguf", {f"{name}.lora_a": a, f"{name}.lora_b": b}, adapter__lora__alpha=3.0)
    part = reader(bases["folder"]).read(path, "").parts["model.embed_tokens.weight"]
    np.testing.assert_allclose(part.delta(), b @ a.T, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__type": "model"}, "general.type is 'model', not 'adapter'"),
        ({"adapter__type": "control"}, "adapter.type is 'control', not 'lora'"),
        ({"general__architecture": "qwen2"}, "general.architecture is 'qwen2', not 'llama'"),
        ({"adapter__alora__invocation_tokens": np.array([1], np.uint32)}, "aLoRA"),
        ({"adapter__lora__alpha": "x"}, "adapter.lora.alpha is 'x', not a number"),
    ],
)
def test_other_files_are_refused(
    bases: Mapping[str, Checkpoint], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.gguf", as_converted(tensors_of("plain")), **changes)
    with pytest.raises(CheckpointError, match=message):
        reader(bases["gguf"]).read(path, "")


def test_tensors_that_do_not_fit_are_named(bases: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    tensors = as_converted(tensors_of("plain"))
    first = "blk.0.attn_v.weight"
    wrong: list[tuple[dict[str, np.ndarray], str]] = [
        ({name: one for name, one in tensors.items() if name != f"{first}.lora_b"}, f"{first}.lora_b' is missing"),
        ({**tensors, "blk.0.attn_norm.weight": np.ones(32, np.float32)}, "blk.0.attn_norm.weight' is not understood"),
        ({**tensors, f"{first}.lora_a": tensors[f"{first}.lora_a"][:, :-1]}, "it is for another model"),
        ({**tensors, f"{first}.lora_a": tensors[f"{first}.lora_a"][:-1]}, "are not factors of a matrix"),
        ({**tensors, f"{first}.lora_a": tensors[f"{first}.lora_a"] * np.inf}, "not a finite number"),
    ]
    for number, (given, message) in enumerate(wrong):
        path = write(tmp_path / f"{number}.gguf", given)
        with pytest.raises(CheckpointError, match=message):
            reader(bases["gguf"]).read(path, "")
