"""Layers as they are written, against files of the compressed-tensors package and packed value by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax.checkpoint.formats.awq import AWQWriter
from llmjax.checkpoint.formats.compressed_tensors import CompressedTensorsWriter
from llmjax.checkpoint.formats.gptq import GPTQWriter
from llmjax.checkpoint.formats.quantized import LayerWriter
from llmjax.checkpoint.formats.registry import plain_tensors
from llmjax.checkpoint.safetensors import SafetensorsTensor, open_safetensors
from llmjax.errors import ConfigError
from llmjax.weights.uniform import SAVED_SCHEMES, Float8Scheme, IntegerScheme

GOLDEN = Path(__file__).parent / "golden" / "compressed_tensors"
MODULE = "model.layers.0.mlp.up_proj"
F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
OF_THE_PACKAGE = {
    "w4_group": IntegerScheme("", 4, 32, scale="bf16"),
    "w4_asym": IntegerScheme("", 4, 64, symmetric=False, scale="bf16"),
    "w4_channel": IntegerScheme("", 4, scale="bf16"),
    "w8_group": IntegerScheme("", 8, 128, scale="bf16"),
    "w8_channel_asym": IntegerScheme("", 8, symmetric=False, scale="bf16"),
    "int8_channel": IntegerScheme("", 8, activations="int8", scale="bf16"),
    "fp8_channel": Float8Scheme(),
    "fp8_tensor": Float8Scheme(per_tensor=True),
}


@pytest.mark.parametrize("name", OF_THE_PACKAGE)
def test_parts_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    """What was read of the package's files is written as it was, and its settings say the same."""
    scheme, path = OF_THE_PACKAGE[name], GOLDEN / f"{name}.safetensors"
    stored = open_safetensors(path)
    del stored["expected"]
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    settings = json.loads(header["__metadata__"]["quantization_config"])
    source = plain_tensors(stored, {"quantization_config": settings}, tmp_path)[f"{MODULE}.weight"].row_source()
    assert source is not None
    form = CompressedTensorsWriter()
    parts = form.parts(scheme, (40, 128))
    assert {f"{MODULE}{ending}" for ending in parts} == set(stored)
    for ending, part in parts.items():
        found, expected = part.make(source.quantized_rows(0, 40)), stored[f"{MODULE}{ending}"].stored
        assert found.shape == part.shape == expected.shape
        assert np.array_equal(found.astype(expected.dtype), expected)
    ours, theirs = (
        config["config_groups"]["group_0"] for config in (form.settings({MODULE: scheme}, ["lm_head"]), settings)
    )
    keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "block_structure")
    assert {key: ours["weights"][key] for key in keys} == {key: theirs["weights"].get(key) for key in keys}
    assert ours["format"] == theirs["format"] == settings["format"] and ours["targets"] == ["Linear"]


def stored(form: LayerWriter, scheme: Any, weights: np.ndarray) -> tuple[dict[str, SafetensorsTensor], np.ndarray]:
    """A layer as it is written, and its weights."""
    rows = scheme.quantize(weights)
    tensors = {}
    for ending, part in form.parts(scheme, weights.shape).items():
        values = np.ascontiguousarray(part.make(rows))
        assert (values.shape, values.dtype) == (part.shape, part.dtype)
        kind = {"int32": "I32", "int64": "I64", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}.get(values.dtype.name)
        kind = kind or {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[values.dtype.name]
        tensors[MODULE + ending] = SafetensorsTensor(MODULE + ending, kind, values.shape, values, Path("f"))
    expected = np.empty(weights.shape, np.float32)
    rows.dequantize(expected)
    return tensors, expected


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", SAVED_SCHEMES)
def test_every_scheme_reads_back_as_compressed_tensors(name: str, dtype: str, tmp_path: Path) -> None:
    form = CompressedTensorsWriter()
    scheme = form.kept(SAVED_SCHEMES[name], np.dtype(dtype))
    tensors, expected = stored(form, scheme, np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32))
    settings = {"quantization_config": form.settings({MODULE: scheme}, ["lm_head"])}
    found = plain_tensors(tensors, json.loads(json.dumps(settings)), tmp_path)[f"{MODULE}.weight"]
    assert np.array_equal(found.read(F32), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [64, 0])
def test_gptq(bits: int, symmetric: bool, group: int, tmp_path: Path) -> None:
    form = GPTQWriter()
    scheme = form.kept(IntegerScheme("x", bits, group, symmetric=symmetric), F16)
    weights = np.random.default_rng(0).standard_normal((32, 96)).astype(np.float32)  # the last group is shorter
    tensors, expected = stored(form, scheme, weights)
    settings = form.settings({MODULE: scheme}, ["lm_head"])
    found = plain_tensors(tensors, {"quantization_config": settings}, tmp_path)[f"{MODULE}.weight"]
    assert np.array_equal(found.read(F32), expected)
    # By the formula, value by value: words hold the lowest code first, and zero points less one.
    words, zeros, scales = (tensors[MODULE + part].stored for part in (".qweight", ".qzeros", ".scales"))
    per_word, mask = 32 // bits, (1 << bits) - 1
    for out, column in ((0, 0), (5, 17), (31, 95)):
        i = 0 if group == 0 else column // group
        code = int(words.view(np.uint32)[column // per_word, out]) >> bits * (column % per_word) & mask
        zero = (int(zeros.view(np.uint32)[i, out // per_word]) >> bits * (out % per_word)) + 1 & mask
        assert np.float32(code - zero) * np.float32(scales[i, out]) == expected[out, column]


def test_awq(tmp_path: Path) -> None:
    form = AWQWriter()
    scheme = form.kept(SAVED_SCHEMES["int4_asym"], F16)
    weights = np.random.default_rng(0).standard_normal((24, 256)).astype(np.float32)
    tensors, expected = stored(form, scheme, weights)
    settings = form.settings({MODULE: scheme}, ["lm_head"])
    found = plain_tensors(tensors, {"quantization_config": settings}, tmp_path)[f"{MODULE}.weight"]
    assert np.array_equal(found.read(F32), expected)
    words, zeros, scales = (tensors[MODULE + part].stored for part in (".qweight", ".qzeros", ".scales"))
    place = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # of an output among the nibbles of its word
    for out, column in ((0, 0), (9, 200), (23, 255)):
        shift = 4 * place[out % 8]
        code = int(words.view(np.uint32)[column, out // 8]) >> shift & 15
        zero = int(zeros.view(np.uint32)[column // 128, out // 8]) >> shift & 15
        assert np.float32(code - zero) * np.float32(scales[column // 128, out]) == expected[out, column]


def test_several_schemes_in_one_model() -> None:
    form = CompressedTensorsWriter()
    int4, fp8 = (form.kept(SAVED_SCHEMES[name], F16) for name in ("int4", "fp8"))
    settings = form.settings({"a.q_proj": fp8, "a.up_proj": int4, "b.up_proj": int4}, ["lm_head"])
    assert settings["format"] == "mixed-precision" and settings["ignore"] == ["lm_head"]
    groups = settings["config_groups"]
    assert [groups[key]["targets"] for key in ("group_0", "group_1")] == [["Linear"], ["a.q_proj"]]
    assert [groups[key]["format"] for key in groups] == ["pack-quantized", "float-quantized"]
    assert groups["group_1"]["input_activations"]["strategy"] == "token"


def test_what_formats_cannot_hold() -> None:
    int4, asym, fp8, w8a8 = (SAVED_SCHEMES[name] for name in ("int4", "int4_asym", "fp8", "w8a8"))
    compressed, gptq, awq = CompressedTensorsWriter(), GPTQWriter(), AWQWriter()
    for form, scheme in ((gptq, fp8), (gptq, w8a8), (awq, int4), (awq, fp8)):
        with pytest.raises(ConfigError, match=f"--format {form.name} cannot hold {scheme.name}"):
            form.kept(scheme, F16)
    with pytest.raises(ConfigError, match="one scale for each row and no zero points"):
        compressed.kept(IntegerScheme("w8a8", 8, 64, activations="int8"), F16)
    with pytest.raises(
        ConfigError, match="576 columns are not a multiple of int4's groups of 128; --group-size 96 or 64"
    ):
        compressed.parts(int4, (32, 576))
    with pytest.raises(ConfigError, match="does not fill the words"):
        gptq.parts(int4, (20, 128))
    with pytest.raises(ConfigError, match="do not fill the words"):
        awq.parts(asym, (20, 128))
    with pytest.raises(ConfigError, match="has one scheme for all layers, not int4, int4_asym"):
        gptq.settings({"a": int4, "b": asym}, ["lm_head"])
    with pytest.raises(ConfigError, match=r"quantizes every layer, a\.k_proj too"):
        gptq.settings({"a": int4}, ["lm_head", "a.k_proj"])
    with pytest.raises(ConfigError, match=r"one group size for all layers, not \[64, 128\]"):
        awq.settings({"a": asym, "b": IntegerScheme("int4_asym", 4, 64, symmetric=False)}, [])
