"""Tensors of families whose files name, fuse, stack or transpose them otherwise than the model has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmjax.checkpoint import open_checkpoint
from llmjax.errors import CheckpointError
from llmjax.models.names import Names
from llmjax.weights.packing import RowStack
from tests.checkpoints import GOLDEN

F32 = np.dtype(np.float32)


def copied(name: str, folder: Path, **changes: np.ndarray | None) -> Path:
    """A golden checkpoint with other tensors in place of some; None: without it."""
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    source = open_safetensors_f32(GOLDEN / name)
    kept = {key: value for key, value in {**source, **changes}.items() if value is not None}
    (folder / "model.safetensors").unlink()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def open_safetensors_f32(folder: Path) -> dict[str, np.ndarray]:
    return {key: value.astype(np.float32) for key, value in load_file(folder / "model.safetensors").items()}


def read(folder: Path, name: str) -> np.ndarray:
    return open_checkpoint(folder).tensors[name].read(F32)


def test_names_in_the_model() -> None:
    names = Names(prefix="t.", modules={"h.*.a": "model.layers.*.b", "h.*.n.*": "model.layers.*.norm"})
    assert names.in_model("t.h.12.a") == names.in_model("h.12.a") == ("model.layers.12.b", None)
    assert names.in_model("h.3.n.10") == ("model.layers.3.norm", 10)
    assert names.in_model("t.h.x.a") == ("t.h.x.a", None)


def test_fused_rows_in_turn_and_by_group() -> None:
    raw = open_safetensors_f32(GOLDEN / "phi3")["model.layers.1.self_attn.qkv_proj.weight"]  # 4 heads, 2 keys, size 8
    for name, rows in (("q", slice(0, 32)), ("k", slice(32, 48)), ("v", slice(48, 64))):
        got = read(GOLDEN / "phi3", f"model.layers.1.self_attn.{name}_proj.weight")
        np.testing.assert_array_equal(got, raw[rows])
    raw = open_safetensors_f32(GOLDEN / "phi3")["model.layers.0.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(read(GOLDEN / "phi3", "model.layers.0.mlp.up_proj.weight"), raw[48:])
    source = open_safetensors_f32(GOLDEN / "falcon-40b")
    for ending in ("weight", "bias"):
        raw = source[f"transformer.h.1.self_attention.query_key_value.{ending}"]  # two groups of q, q, k, v
        head = np.split(raw, 8)
        for name, heads in (("q", (0, 1, 4, 5)), ("k", (2, 6)), ("v", (3, 7))):
            got = read(GOLDEN / "falcon-40b", f"model.layers.1.self_attn.{name}_proj.{ending}")
            np.testing.assert_array_equal(got, np.concatenate([head[i] for i in heads]))


def test_matrices_that_lie_the_other_way_round() -> None:
    raw = open_safetensors_f32(GOLDEN / "gpt2")
    for stored, name in (("attn.c_proj", "self_attn.o_proj"), ("mlp.c_fc", "mlp.up_proj")):
        got = read(GOLDEN / "gpt2", f"model.layers.0.{name}.weight")
        np.testing.assert_array_equal(got, raw[f"transformer.h.0.{stored}.weight"].T)


def test_a_prefix_may_be_left_out(tmp_path: Path) -> None:
    raw = open_safetensors_f32(GOLDEN / "gpt2")
    bare = {key.removeprefix("transformer."): value for key, value in raw.items()}
    folder = copied("gpt2", tmp_path, **dict.fromkeys(raw), **bare)
    got, expected = open_checkpoint(folder).tensors, open_checkpoint(GOLDEN / "gpt2").tensors
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        np.testing.assert_array_equal(got[key].read(F32), tensor.read(F32))


@pytest.mark.parametrize("name", ["phi3", "falcon-40b"])
def test_fused_matrices_stay_quantized(name: str, tmp_path: Path) -> None:
    """LLM.int8: a scale a row, 127 times what a code stands for."""
    rng, changes, expected = np.random.default_rng(0), {}, {}
    endings = ("qkv_proj.weight", "gate_up_proj.weight", "query_key_value.weight")
    for key, plain in open_safetensors_f32(GOLDEN / name).items():
        if key.endswith(endings):
            codes = rng.integers(-127, 128, plain.shape, np.int8)
            scales = rng.uniform(0.5, 2, len(plain)).astype(np.float32)
            changes |= {key: codes, key.replace(".weight", ".SCB"): scales}
            expected[key] = codes * (scales[:, None] / np.float32(127))
    folder = copied(name, tmp_path, **changes)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    plain = copied(name, tmp_path / "plain", **expected)
    want, found = open_checkpoint(plain).tensors, 0
    for key, tensor in open_checkpoint(folder).tensors.items():
        source = tensor.row_source()
        np.testing.assert_allclose(tensor.read(F32), want[key].read(F32), rtol=1e-6, err_msg=key)
        if source is None:
            continue
        found += 1
        assert not isinstance(source, RowStack) and source.size_out == tensor.shape[0]
        for start, stop in ((0, source.size_out), (3, 13)):
            out = np.empty((stop - start, tensor.shape[1]), np.float32)
            source.quantized_rows(start, stop).dequantize(out)
            np.testing.assert_allclose(out, want[key].read(F32)[start:stop], rtol=1e-6, err_msg=key)
    assert found == (15 if name == "phi3" else 6)


def test_wrong_shapes_and_missing_vectors(tmp_path: Path) -> None:
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(CheckpointError, match=rf"tensor '{fused}' has 63 rows, not 64 for queries, keys and values"):
        open_checkpoint(copied("phi3", tmp_path / "a", **{fused: np.zeros((63, 32), np.float32)}))
    fused = "model.layers.0.mlp.gate_up_proj.weight"
    with pytest.raises(CheckpointError, match=rf"tensor '{fused}' has 95 rows, not an even number for gate and up"):
        open_checkpoint(copied("phi3", tmp_path / "b", **{fused: np.zeros((95, 32), np.float32)}))
    norm = "model.layers.0.self_attn.q_layernorm.norms.1.weight"
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_norm\.weight' .* number 1 is missing"):
        open_checkpoint(copied("stablelm-2-12b", tmp_path / "c", **{norm: None}))
    with pytest.raises(CheckpointError, match="vectors, which differ in size"):
        open_checkpoint(copied("stablelm-2-12b", tmp_path / "d", **{norm: np.ones(7, np.float32)}))
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight' is there twice"):
        twin = {"model.layers.0.self_attn.q_proj.weight": np.zeros((32, 32), np.float32)}
        open_checkpoint(copied("phi3", tmp_path / "e", **twin))


def test_rows_of_a_head_are_made_one_long_where_the_vocabulary_says_so() -> None:
    folder = GOLDEN / "baichuan-13b"
    plain = read(folder, "lm_head.weight")
    unit = open_checkpoint(folder, overrides={"vocab_size": 125696}).tensors["lm_head.weight"]
    assert (unit.shape, unit.nbytes, unit.row_source()) == (plain.shape, plain.size * 2, None)
    np.testing.assert_allclose(unit.read(F32), plain / np.sqrt((plain**2).sum(1, keepdims=True)), rtol=1e-6)


def test_shared_experts_with_gate_and_up_in_one() -> None:
    folder = GOLDEN / "granite-moe-shared"
    raw = open_safetensors_f32(folder)["model.layers.1.shared_mlp.input_linear.weight"]
    for name, rows in (("gate", slice(0, 24)), ("up", slice(24, 48))):
        got = read(folder, f"model.layers.1.mlp.shared_mlp.{name}_proj.weight")
        np.testing.assert_array_equal(got, raw[rows])
