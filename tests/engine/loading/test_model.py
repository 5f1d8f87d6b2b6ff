"""Messages about a model while it is loaded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax.config import EngineConfig
from llmjax.engine.loading import model
from llmjax.errors import CheckpointError, ConfigError
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.matrices import takes_panels
from llmjax.kernels.panels import PanelTensor
from llmjax.kernels.qtensor import QTensor
from llmjax.platforms import select_platform
from llmjax.weights import panels
from tests.checkpoints import GOLDEN, SEEING

LLAMA = GOLDEN / "llama"


@pytest.mark.parametrize("quantization,native,lines", [("q8_0", False, 1), ("q8_0", True, 0), ("none", False, 0)])
def test_quantized_weights_without_kernels_are_one_warning(
    quantization: str, native: bool, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model, "library", lambda: "there" if native else None)
    config = EngineConfig(model=str(LLAMA), quantization=quantization, dtype="float32", device="cpu")
    model.load_model(config, select_platform(config))
    assert len([r for r in caplog.records if r.name == model.__name__ and "--quantization none" in r.message]) == lines


def test_what_a_model_takes_apart_is_not_quantized() -> None:
    """Latent attention absorbs the two halves of one matrix, which it would dequantize again at every step."""
    config = EngineConfig(model=str(GOLDEN / "deepseek-v2"), quantization="int8", dtype="float32", device="cpu")
    params = model.load_model(config, select_platform(config)).params
    attention = {name: weight for name, weight in params.items() if ".0.self_attn." in name and "proj" in name}
    plain = {name.split(".")[-2] for name, weight in attention.items() if isinstance(weight, jax.Array)}
    quantized = {name.split(".")[-2] for name, weight in attention.items() if isinstance(weight, QTensor)}
    assert "kv_b_proj" in plain and "kv_b_proj" not in quantized
    assert quantized == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}


@pytest.mark.skipif(
    (native := library()) is None or not takes_panels(native), reason="this machine or build takes no panels"
)
@pytest.mark.parametrize("name", ["idefics3", "qwen2_5-vl"])
def test_matrices_of_an_encoder_s_layers_are_in_panels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(SEEING / name), dtype="bfloat16", device="cpu")
    made = model.load_model(config, select_platform(config)).encoder
    monkeypatch.setattr(panels, "library", lambda: None)
    plain = model.load_model(config, select_platform(config)).encoder
    assert made is not None and plain is not None
    for parameter, weight in made.params.items():
        is_matrix = parameter.startswith("layers.") and parameter.endswith("proj.weight")
        assert isinstance(weight, PanelTensor) == is_matrix, parameter
        rows = weight.rows if isinstance(weight, PanelTensor) else weight
        np.testing.assert_array_equal(np.asarray(rows), np.asarray(plain.params[parameter]))


@pytest.mark.parametrize(
    ("name", "plain", "quantized"),
    [
        ("stablelm-2-12b", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("gpt2", "model.embed_positions.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_norms_of_heads_and_tables_of_positions_are_not_quantized(name: str, plain: str, quantized: str) -> None:
    config = EngineConfig(model=str(GOLDEN / name), quantization="int8", dtype="float32", device="cpu")
    params = model.load_model(config, select_platform(config)).params
    assert isinstance(params[plain], jax.Array) and isinstance(params[quantized], QTensor)


def test_decays_that_minimax_s_class_stores_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(GOLDEN / "minimax", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.slope_rate"] = np.ones((4, 1, 1), np.float32)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")
    model.load_model(config, select_platform(config))
    assert not [record.message for record in caplog.records if "not used" in record.message]


def test_buffers_that_old_checkpoints_carry_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(GOLDEN / "gpt-neox", tmp_path, dirs_exist_ok=True)
    tensors, prefix = load_file(tmp_path / "model.safetensors"), "gpt_neox.layers.0.attention"
    tensors |= {f"{prefix}.bias": np.ones((1, 1, 4, 4), bool), f"{prefix}.masked_bias": np.array(-1e9, np.float32)}
    tensors[f"{prefix}.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")
    model.load_model(config, select_platform(config))
    assert not [record.message for record in caplog.records if "not used" in record.message]


def test_chunks_of_attention_that_do_not_consist_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before a weight is read, and names a page size that works."""
    name = str(GOLDEN / "llama4-long")  # chunks of 8
    config = EngineConfig(model=name, dtype="float32", device="cpu", page_size=6)
    monkeypatch.setattr(model, "Placer", None)
    message = (
        "page_size 6: the model's attention_chunk_size, 8, is not a multiple of it; set page_size to 4, or max_mod"
    )
    for refused in (lambda: model.load_model(config, select_platform(config)), lambda: model.check_stages(config)):
        with pytest.raises(ConfigError, match=message):
            refused()
    model.check_stages(replace(config, max_model_len=8))
    model.check_stages(replace(config, page_size=4))


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_the_config_does_not_ask_for(
    value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros, as exporters of GPTQ write them, are skipped with a message; other biases are an error."""
    shutil.copytree(GOLDEN / "llama", tmp_path, dirs_exist_ok=True)
    name = "model.layers.1.mlp.down_proj.bias"
    tensors = load_file(tmp_path / "model.safetensors") | {name: np.full(32, value, np.float32)}
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")
    if value:
        with pytest.raises(CheckpointError, match=f"tensor {name} is a bias, which the config says there is none of"):
            model.load_model(config, select_platform(config))
    else:
        model.load_model(config, select_platform(config))
        assert f"1 tensors of {tmp_path} are not used, for example {name}" in caplog.text
