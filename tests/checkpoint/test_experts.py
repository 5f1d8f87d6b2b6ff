"""Experts of checkpoints: stacked whichever way they are stored, quantized or not, and written one by one again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import ml_dtypes
import numpy as np
import pytest

from llmjax import models
from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.experts import with_separate_experts, with_stacked_experts
from llmjax.checkpoint.formats.registry import plain_tensors
from llmjax.checkpoint.gguf.file import GGUFTensor
from llmjax.checkpoint.safetensors import SafetensorsTensor, TensorSpec, open_safetensors_writer
from llmjax.errors import CheckpointError
from llmjax.kernels.qtensor import QTensor
from llmjax.quantization.folder_export import export_folder
from llmjax.quantization.gguf_export import export_gguf
from llmjax.quantization.plan import QuantizationPlan, SavePlan
from llmjax.quantization.rounding import round_to_nearest, rows_in_situ
from llmjax.quantization.schemes import scheme_named
from llmjax.weights.packing import pack, put
from tests.checkpoints import GOLDEN

F32 = np.dtype(np.float32)
FAMILIES = ("mixtral", "qwen2-moe", "qwen3-moe")
EXPERTS = "model.layers.0.mlp.experts"


def tensor(name: str, array: np.ndarray) -> SafetensorsTensor:
    kind = {"uint8": "U8", "float32": "F32", "int32": "I32", "float16": "F16", "float8_e4m3fn": "F8_E4M3"}[
        array.dtype.name
    ]
    return SafetensorsTensor(name, kind, array.shape, array, Path("model.safetensors"))


def stacked(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return with_stacked_experts({name: tensor(name, array) for name, array in arrays.items()}, Path("here"))


def dequantized(source: Any, *, tile: int = 16) -> np.ndarray:
    weight = put(source, pack(source, tile=tile), dtype=F32, activations="float", device=jax.devices()[0])
    return np.asarray(jax.jit(QTensor.dequantize)(weight))


def bigger(folder: Path, name: str) -> Path:
    """A golden checkpoint's architecture with random weights wide enough for blocks of 32 and groups of 64."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config |= {"hidden_size": 64, "num_hidden_layers": 1, "head_dim": 16, "mlp_only_layers": []}
    config |= {"intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    source, rng, arrays = open_checkpoint(GOLDEN / name), np.random.default_rng(0), {}
    inner = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    one_layer = {n: t for n, t in source.tensors.items() if ".layers." not in n or ".layers.0." in n}
    for key, old in with_separate_experts(one_layer, mixtral=name == "mixtral").items():
        part = key.split(".")[-2]
        shape = inner.get(part) or tuple(64 if size in (32, 48, 40, 16) else size for size in old.shape)
        if key.endswith("bias") or part in ("q_norm", "k_norm"):
            shape = (inner[part][0],) if part in inner else (16,)
        arrays[key] = rng.standard_normal(shape).astype(np.float32)
    with open_safetensors_writer(
        folder, [TensorSpec(key, array.shape, F32) for key, array in arrays.items()], shard_bytes=1 << 30
    ) as writer:
        for key, array in arrays.items():
            writer.write(key, array)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_published_one_by_one_and_stacked() -> None:
    rng = np.random.default_rng(0)
    both, down = rng.random((3, 10, 4), np.float32), rng.random((3, 4, 5), np.float32)
    by_expert = {f"{EXPERTS}.{e}.gate_proj.weight": both[e, :5] for e in range(3)}
    by_expert |= {f"{EXPERTS}.{e}.up_proj.weight": both[e, 5:] for e in (2, 0, 1)}
    by_expert |= {f"{EXPERTS}.{e}.down_proj.weight": down[e] for e in range(3)}
    mixtral = {
        name.replace("mlp", "block_sparse_moe").replace("gate_proj", "w1").replace("up_proj", "w3"): array
        for name, array in by_expert.items()
    }
    mixtral = {name.replace("down_proj", "w2"): array for name, array in mixtral.items()}
    fused = {f"{EXPERTS}.gate_up_proj": both, f"{EXPERTS}.down_proj": down}
    for arrays in (by_expert, mixtral, fused, {f"{name}.weight": array for name, array in fused.items()}):
        found = stacked(arrays)
        assert sorted(found) == [f"{EXPERTS}.{part}_proj.weight" for part in ("down", "gate", "up")]
        np.testing.assert_array_equal(found[f"{EXPERTS}.gate_proj.weight"].read(F32), both[:, :5])
        np.testing.assert_array_equal(found[f"{EXPERTS}.up_proj.weight"].read(F32), both[:, 5:])
        np.testing.assert_array_equal(
            found[f"{EXPERTS}.down_proj.weight"].read(np.dtype(np.float16)), down.astype("f2")
        )
        assert sum(stack.nbytes for stack in found.values()) == both.nbytes + down.nbytes
        assert found[f"{EXPERTS}.down_proj.weight"].shape == (3, 4, 5)
    for arrays, is_mixtral in ((by_expert, False), (mixtral, True)):
        again = with_separate_experts(stacked(arrays), mixtral=is_mixtral)
        assert {name: one.read(F32).tolist() for name, one in again.items()} == {
            n: a.tolist() for n, a in arrays.items()
        }


def test_routers_of_mixtral_granite_and_minimax_are_renamed() -> None:
    block = "model.layers.3.block_sparse_moe"
    for name in ("gate.weight", "router.layer.weight"):
        assert set(stacked({f"{block}.{name}": np.zeros((4, 8), F32)})) == {"model.layers.3.mlp.gate.weight"}
    bias = "e_score_correction_bias"
    assert set(stacked({f"{block}.{bias}": np.zeros(4, F32)})) == {f"model.layers.3.mlp.gate.{bias}"}


def test_matrices_of_llama4_are_transposed() -> None:
    rng = np.random.default_rng(4)
    both, down = rng.random((3, 4, 10), np.float32), rng.random((3, 5, 4), np.float32)
    module = "model.layers.0.feed_forward"
    found = stacked({f"{module}.experts.gate_up_proj": both, f"{module}.experts.down_proj": down})
    np.testing.assert_array_equal(found[f"{EXPERTS}.gate_proj.weight"].read(F32), both[..., :5].swapaxes(1, 2))
    np.testing.assert_array_equal(found[f"{EXPERTS}.up_proj.weight"].read(F32), both[..., 5:].swapaxes(1, 2))
    np.testing.assert_array_equal(found[f"{EXPERTS}.down_proj.weight"].read(F32), down.swapaxes(1, 2))
    names = set(stacked({f"{module}.router.weight": both[0], f"{module}.expert_bias": both[0, 0]}))
    assert names == {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.e_score_correction_bias"}


def test_experts_of_dbrx_follow_each_other_by_rows() -> None:
    rng = np.random.default_rng(5)
    w1, v1, w2 = rng.random((3, 3 * 5, 4), np.float32)
    module = "transformer.blocks.0.ffn"
    arrays = {f"{module}.router.layer.weight": np.zeros((3, 4), F32)}
    arrays |= {f"{module}.experts.mlp.{name}": one for name, one in (("w1", w1), ("v1", v1), ("w2", w2))}
    found = stacked(arrays)
    np.testing.assert_array_equal(found[f"{module}.experts.gate_proj.weight"].read(F32), w1.reshape(3, 5, 4))
    np.testing.assert_array_equal(found[f"{module}.experts.up_proj.weight"].read(F32), v1.reshape(3, 5, 4))
    down = found[f"{module}.experts.down_proj.weight"].read(F32)
    np.testing.assert_array_equal(down, w2.reshape(3, 5, 4).swapaxes(1, 2))


def test_experts_of_gpt_oss_take_turns_and_are_transposed() -> None:
    rng = np.random.default_rng(0)
    both, down = rng.random((3, 4, 10), np.float32), rng.random((3, 5, 4), np.float32)
    biases = {"gate_up_proj_bias": rng.random((3, 10), np.float32), "down_proj_bias": rng.random((3, 4), np.float32)}
    arrays = {"gate_up_proj": both, "down_proj": down, **biases}
    found = stacked({f"{EXPERTS}.{name}": array for name, array in arrays.items()})
    expected = {
        "gate_proj.weight": both[:, :, ::2].swapaxes(1, 2),
        "up_proj.weight": both[:, :, 1::2].swapaxes(1, 2),
        "down_proj.weight": down.swapaxes(1, 2),
        "gate_proj.bias": biases["gate_up_proj_bias"][:, ::2],
        "up_proj.bias": biases["gate_up_proj_bias"][:, 1::2],
        "down_proj.bias": biases["down_proj_bias"],
    }
    assert set(found) == {f"{EXPERTS}.{name}" for name in expected}
    for name, values in expected.items():
        one = found[f"{EXPERTS}.{name}"]
        assert one.shape == values.shape and one.nbytes == values.nbytes
        np.testing.assert_array_equal(one.read(F32), values)
    with pytest.raises(CheckpointError, match="is empty"):
        stacked({f"{EXPERTS}.down_proj": np.zeros((3, 0, 4), F32), f"{EXPERTS}.down_proj_bias": np.zeros((3, 4), F32)})


def test_mxfp4_of_gpt_oss_stays_quantized_where_rows_take_turns(caplog: pytest.LogCaptureFixture) -> None:
    biases = {
        f"{EXPERTS}.{name}_bias": np.zeros((3, rows), F32) for name, rows in (("gate_up_proj", 12), ("down_proj", 32))
    }
    stored = {name: tensor(name, array) for name, array in (mxfp4() | biases).items()}
    plain = plain_tensors(stored, {"quantization_config": {"quant_method": "mxfp4"}}, Path("here"))
    found = with_stacked_experts(plain, Path("here"))
    whole = plain[f"{EXPERTS}.gate_up_proj"].read(F32)
    for part, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
        stack = found[f"{EXPERTS}.{part}_proj.weight"]
        np.testing.assert_array_equal(stack.read(F32), whole[:, rows])
        np.testing.assert_array_equal(dequantized(stack.row_source()), whole[:, rows])
    down = found[f"{EXPERTS}.down_proj.weight"]
    np.testing.assert_array_equal(dequantized(down.row_source()), plain[f"{EXPERTS}.down_proj"].read(F32))
    assert [record.message for record in caplog.records if "dequantized" in record.message] == []


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {f"{EXPERTS}.{e}.up_proj.weight": np.zeros((2, 4), F32) for e in (0, 2)},
            f"'{EXPERTS}.1.up_proj.weight' is miss",
        ),
        (
            {"m.block_sparse_moe.experts.1.w2.weight": np.zeros((2, 4), F32)},
            "'m.block_sparse_moe.experts.0.w2.weight' is missing, but expert 1 is there",
        ),
        (
            {f"{EXPERTS}.{e}.up_proj.weight": np.zeros((2 + e, 4), F32) for e in (0, 1)},
            r"has shape \[3, 4\], but that of expert 0 is \[2, 4\]",
        ),
        (
            {f"{EXPERTS}.0.up_proj.weight": np.zeros((2, 4), F32), f"{EXPERTS}.up_proj": np.zeros((1, 2, 4), F32)},
            "is there twice, stacked and expert by expert",
        ),
        (
            {f"{EXPERTS}.gate_up_proj": np.zeros((2, 6, 4), F32), f"{EXPERTS}.up_proj": np.zeros((2, 3, 4), F32)},
            f"'{EXPERTS}.up_proj.weight' is there twice, once in '{EXPERTS}.up_proj'",
        ),
        (
            {
                f"{EXPERTS}.gate_up_proj": np.zeros((2, 6, 4), ml_dtypes.float8_e4m3fn),
                f"{EXPERTS}.gate_up_proj_scale_inv": np.ones((2, 1, 1), F32),
            },
            f"'{EXPERTS}.gate_up_proj' is a stack of type F8_E4M3, whose scales '.*_scale_inv' are not",
        ),
        ({f"{EXPERTS}.gate_up_proj": np.zeros((2, 5, 4), F32)}, "has 5 rows, not an even number for gate and up"),
        (
            {f"{EXPERTS}.gate_up_proj": np.zeros((1 << 40, 2, 0), F32)},
            r"its shape is \[1099511627776, 2, 0\]",
        ),
        (
            {"model.layers.0.feed_forward.experts.gate_up_proj": np.zeros((2, 4, 5), F32)},
            "has 5 columns, not an even number",
        ),
        ({"transformer.blocks.0.ffn.experts.mlp.w1": np.zeros((6, 4), F32)}, "whose number the router would say"),
        (
            {
                "transformer.blocks.0.ffn.experts.mlp.w1": np.zeros((7, 4), F32),
                "transformer.blocks.0.ffn.router.layer.weight": np.zeros((2, 4), F32),
            },
            "has 7 rows, which 2 experts cannot share",
        ),
        ({f"{EXPERTS}.down_proj": np.zeros((0, 2, 4), F32)}, r"is empty: its shape is \[0, 2, 4\]"),
    ],
)
def test_what_does_not_fit_is_named(arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        stacked(arrays)


@pytest.mark.parametrize("expert", ["01", "\u0661", "9" * 5000])
def test_what_is_not_written_as_experts_are_numbered_is_not_one(expert: str) -> None:
    name = f"{EXPERTS}.{expert}.up_proj.weight"
    assert set(stacked({name: np.zeros((2, 4), F32)})) == {name}


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_plain_stacks_lie_where_the_device_takes_them_as_they_are(dtype: Any) -> None:
    arrays = {f"{EXPERTS}.{e}.up_proj.weight": np.full((3, 5), e, F32) for e in range(4)}
    values = stacked(arrays)[f"{EXPERTS}.up_proj.weight"].read(np.dtype(dtype))
    on_device = jax.device_put(values, jax.devices("cpu")[0])
    assert on_device.unsafe_buffer_pointer() == values.ctypes.data
    np.testing.assert_array_equal(values, np.arange(4)[:, None, None] * np.ones((4, 3, 5)))


def mxfp4() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    arrays = {}
    for module, rows in (("gate_up_proj", 12), ("down_proj", 32)):
        arrays[f"{EXPERTS}.{module}_blocks"] = rng.integers(0, 256, (3, rows, 2, 16), np.uint8)
        arrays[f"{EXPERTS}.{module}_scales"] = rng.integers(120, 130, (3, rows, 2), np.uint8)
    return arrays


def test_stacks_of_mxfp4_stay_quantized(caplog: pytest.LogCaptureFixture) -> None:
    stored = {name: tensor(name, array) for name, array in mxfp4().items()}
    plain = plain_tensors(stored, {"quantization_config": {"quant_method": "mxfp4"}}, Path("here"))
    whole = plain[f"{EXPERTS}.gate_up_proj"]
    found = with_stacked_experts(plain, Path("here"))
    for part, rows in (("gate", slice(6)), ("up", slice(6, 12))):
        stack = found[f"{EXPERTS}.{part}_proj.weight"]
        np.testing.assert_array_equal(stack.read(F32), whole.read(F32)[:, rows])
        np.testing.assert_array_equal(dequantized(stack.row_source()), whole.read(F32)[:, rows])
    assert not caplog.records
    assert whole.row_source() is None
    assert f"'{EXPERTS}.gate_up_proj' of type MXFP4 is dequantized: a stack" in caplog.records[0].message


def gptq(expert: int, *, shuffled: bool, bits: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(expert)
    module = f"{EXPERTS}.{expert}.up_proj"
    groups = np.arange(64) // 32
    return {
        f"{module}.qweight": rng.integers(-(1 << 31), 1 << 31, (64 * bits // 32, 16)).astype(np.int32),
        f"{module}.qzeros": rng.integers(-(1 << 31), 1 << 31, (2, 16 * bits // 32)).astype(np.int32),
        f"{module}.scales": rng.random((2, 16)).astype(np.float16),
        f"{module}.g_idx": (rng.permutation(groups) if shuffled else groups).astype(np.int32),
    }


def gptq_stack(parts: Mapping[str, np.ndarray]) -> Any:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    settings["dynamic"] = {r"+:.*experts\.1\..*": {"bits": 8}}
    stored = {name: tensor(name, array) for name, array in parts.items()}
    return with_stacked_experts(plain_tensors(stored, {"quantization_config": settings}, Path("here")), Path("here"))[
        f"{EXPERTS}.up_proj.weight"
    ]


def test_columns_of_each_expert_keep_their_order() -> None:
    stack = gptq_stack({**gptq(0, shuffled=True), **gptq(1, shuffled=False), **gptq(2, shuffled=True)})
    source = stack.row_source()
    assert source.columns.shape == (3, 64)
    np.testing.assert_array_equal(dequantized(source), stack.read(F32))


def test_experts_of_different_formats_are_dequantized_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    stack = gptq_stack({**gptq(0, shuffled=False), **gptq(1, shuffled=False, bits=8)})
    assert stack.row_source() is None
    (record,) = caplog.records
    assert "experts 0 and 1 are stored in different formats" in record.message and stack.name in record.message
    assert stack.type_name == "GPTQ-4 and GPTQ-8"


@pytest.mark.parametrize("plain", [0, 1])
def test_a_plain_expert_among_quantized_ones_is_said(caplog: pytest.LogCaptureFixture, plain: int) -> None:
    parts = {**gptq(1 - plain, shuffled=False), f"{EXPERTS}.{plain}.up_proj.weight": np.ones((16, 64), np.float16)}
    stack = gptq_stack(parts)
    assert stack.row_source() is None
    (record,) = caplog.records
    assert f"expert {plain} has to be read as plain numbers" in record.message
    np.testing.assert_array_equal(stack.read(F32)[plain], 1)


@pytest.mark.parametrize(
    ("name", "scheme", "form"),
    [
        ("mixtral", "int4", "compressed-tensors"),
        ("mixtral", "int4_asym", "awq"),
        ("qwen2-moe", "int4", "gptq"),
        ("qwen3-moe", "fp8", "compressed-tensors"),
    ],
)
def test_written_quantized_and_read_again(tmp_path: Path, name: str, scheme: str, form: str) -> None:
    (tmp_path / "source").mkdir()
    source = open_checkpoint(bigger(tmp_path / "source", name))
    plan = SavePlan.of(source, scheme, form=form, group_size=None if scheme == "fp8" else 32)
    results = list(round_to_nearest(plan.tensors, plan.layers))
    export_folder(
        plan, tmp_path / "out", results=iter(results), write_tokenizer=lambda folder: None, shard_bytes=1 << 30
    )
    module = "block_sparse_moe.experts.1.w1" if name == "mixtral" else "mlp.experts.1.gate_proj"
    assert all(part.startswith(f"model.layers.0.{module}.") for part in plan.parts(f"model.layers.0.{module}.weight"))
    found = open_checkpoint(tmp_path / "out")
    assert set(found.tensors) == set(source.tensors)
    stack = found.tensors[f"{EXPERTS}.gate_proj.weight"]
    kept = QuantizationPlan.of(None, {}, found.model_config(), stored=found.quantization).keep(stack)
    assert kept.source is not None and stack.shape == source.tensors[stack.name].shape
    np.testing.assert_array_equal(dequantized(kept.source), stack.read(F32))
    np.testing.assert_allclose(stack.read(F32), source.tensors[stack.name].read(F32), atol=0.35)
    assert found.tensors["model.layers.0.mlp.gate.weight"].row_source() is None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scheme", ["f32", "q8_0"])
def test_gguf_and_back(tmp_path: Path, name: str, scheme: str) -> None:
    (tmp_path / "source").mkdir()
    source = open_checkpoint(bigger(tmp_path / "source", name))
    export_gguf(source, tmp_path / "x.gguf", scheme=scheme)
    found = open_checkpoint(tmp_path / "x.gguf")
    assert set(found.tensors) == set(source.tensors)
    for key, original in source.tensors.items():
        again, atol = found.tensors[key], 0.02 if scheme == "q8_0" and "norm" not in key else 0
        assert again.shape == original.shape
        np.testing.assert_allclose(again.read(F32), original.read(F32), rtol=0, atol=atol)
    assert found.config["architectures"] == source.config["architectures"]
    assert models.model_config(found.config).layers == models.model_config(source.config).layers
    if scheme == "q8_0":
        for part in ("gate", "up", "down"):
            stack = found.tensors[f"{EXPERTS}.{part}_proj.weight"]
            np.testing.assert_array_equal(dequantized(stack.row_source(), tile=32), stack.read(F32))


def test_stacks_of_gguf_are_quantized_anew_matrix_by_matrix(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = open_checkpoint(bigger(tmp_path / "source", "qwen3-moe"))
    first = export_gguf(source, tmp_path / "a.gguf", scheme="f32")
    with patch.object(GGUFTensor, "read", autospec=True, side_effect=GGUFTensor.read) as reads:
        again = export_gguf(open_checkpoint(tmp_path / "a.gguf"), tmp_path / "b.gguf", scheme="q8_0")
    assert max(len(call.args[0].shape) for call in reads.call_args_list if ".ffn_down" in call.args[0].name) == 3
    assert max(call.args[0].shape[0] for call in reads.call_args_list if len(call.args[0].shape) == 3) == 1
    export_gguf(source, tmp_path / "c.gguf", scheme="q8_0")
    one_step, two_steps = (open_checkpoint(tmp_path / name).tensors for name in ("c.gguf", "b.gguf"))
    for name, tensor in one_step.items():
        np.testing.assert_array_equal(two_steps[name].read(F32), tensor.read(F32))
    assert [each.source_nbytes for each in again.tensors] == [each.info.nbytes for each in first.tensors]


def test_one_warning_for_a_stack_whose_experts_are_read_whole(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    parts = {**gptq(0, shuffled=False), **gptq(1, shuffled=True), **gptq(2, shuffled=True)}
    for expert in (1, 2):  # groups of unequal size
        parts[f"{EXPERTS}.{expert}.up_proj.g_idx"][:] = np.arange(64) >= 20
    stored = {name: tensor(name, array) for name, array in parts.items()}
    plain = plain_tensors(stored, {"quantization_config": settings}, Path("here"))
    stack: Any = with_stacked_experts(plain, Path("here"))[f"{EXPERTS}.up_proj.weight"]
    found = dequantized(rows_in_situ(stack, scheme_named("q8_0")))
    (record,) = caplog.records
    assert f"'{EXPERTS}.1.up_proj.weight' of type GPTQ-4 is dequantized: " in record.message
    np.testing.assert_allclose(found, stack.read(F32), atol=0.1)


@pytest.mark.parametrize("scheme", ["q8_0", "q4_0", "int8", "fp8", "int4_g64"])
def test_quantized_while_they_are_read(tmp_path: Path, scheme: str) -> None:
    source = open_checkpoint(bigger(tmp_path, "qwen3-moe"))
    plan = QuantizationPlan.of(scheme, {}, source.model_config())
    stack: Any = source.tensors[f"{EXPERTS}.down_proj.weight"]
    whole = dequantized(plan.keep(stack).source)
    singly = [dequantized(plan.keep(matrix).source) for matrix in stack.sources]
    np.testing.assert_array_equal(whole, np.stack(singly))
    assert np.abs(whole - stack.read(F32)).max() < 0.4
    assert plan.keep(source.tensors["model.layers.0.mlp.gate.weight"]).source is None
