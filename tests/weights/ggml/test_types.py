"""Dequantization, on the host and of packed matrices, against the `gguf` package, value for value."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf.quants import dequantize as reference

from llmjax.errors import CheckpointError
from llmjax.kernels.row_format import RowFormat
from llmjax.weights.ggml.types import GGML_TYPES, TILE, BlockType, dequantize
from llmjax.weights.ggml.unpack import grid
from llmjax.weights.packing import pack, put
from llmjax.weights.rows import QuantizedRows

BY_NAME = {block.name: (type_id, block) for type_id, block in GGML_TYPES.items()}
QUANTIZED = [block.name for block in GGML_TYPES.values() if block.unpack is not None]
F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)

SCALES = [0.0, -0.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.5, np.inf, -np.inf, np.nan]


def expected(raw: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        if name in ("Q1_0", "Q2_0"):  # not in the package
            return by_definition(raw, name)
        return reference(raw, gguf.GGMLQuantizationType(BY_NAME[name][0])).astype(np.float32)


def by_definition(raw: np.ndarray, name: str) -> np.ndarray:
    """A f16 scale d, then codes q from the lowest bits up: (2 q - 1) d of 1 bit, (q - 1) d of 2."""
    bits, elems = (1, 128) if name == "Q1_0" else (2, 64)
    values = []
    for block in raw.reshape(-1, 18):
        codes = int.from_bytes(block[2:].tobytes(), "little")
        quants = [codes >> (bits * index) & ((1 << bits) - 1) for index in range(elems)]
        scale = np.float32(block[:2].view(np.float16)[0])
        values.append([np.float32(2 * q - 1 if bits == 1 else q - 1) * scale for q in quants])
    return np.array(values, np.float32).reshape(len(raw), -1)


def random_rows(name: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """uint8 [rows, bytes] of a number of blocks a row, every code of which is a number."""
    block = BY_NAME[name][1]
    raw = np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] * block.nbytes), dtype=np.uint8)
    blocks = raw.reshape(-1, block.nbytes)
    if name == "NVFP4":
        blocks[:, :4] &= 0x7F
    if name == "MXFP4":
        blocks[:, 0] %= 255
    return raw


def extreme_blocks(name: str) -> np.ndarray:
    """Every pair of extreme scales with codes that are all zero, all ones, and random."""
    block = BY_NAME[name][1]
    assert block.layout is not None
    rng = np.random.default_rng(1)
    pairs = [(first, second) for first in SCALES for second in SCALES]
    shape = (len(pairs), block.nbytes)
    fills = [np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8), rng.integers(0, 256, shape, np.uint8)]
    raw = np.concatenate(fills)
    fields = raw.view(block.layout)[:, 0]
    halves = [field for field in ("d", "m", "dmin") if field in (block.layout.names or ()) and name != "NVFP4"]
    for position, field in enumerate(halves):
        fields[field] = np.array([pair[position] for pair in pairs] * len(fills), np.float16)
    if name == "MXFP4":
        fields["e"] = np.resize(np.array([0, 1, 2, 127, 253, 254], np.uint8), len(fields))
    if name == "NVFP4":
        fields["d"] = np.resize(np.array([0, 1, 7, 8, 0x77, 0x7E, 0x7F], np.uint8), fields["d"].shape)
    if name == "IQ1_M":  # its scale is spread over the top nibbles of four words, the lowest first
        words = np.array([pair[0] for pair in pairs] * len(fills), np.float16).view(np.uint16)
        fields["scales"] &= 0x0FFF
        fields["scales"] |= words[:, None] << np.array([12, 8, 4, 0], np.uint16) & 0xF000
    return raw


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Equality that tells -0 from 0 and takes any nan for any other."""
    words = np.dtype(f"u{left.itemsize}")
    nan = np.isnan(left) & np.isnan(right)
    return left.dtype == right.dtype and bool(np.all((left.view(words) == right.view(words)) | nan))


@pytest.mark.parametrize("name", QUANTIZED)
def test_random_blocks(name: str) -> None:
    block = BY_NAME[name][1]
    raw = random_rows(name, 0, (37, 5))
    values = dequantize(raw, block, F32)
    assert values.shape == (37, 5 * block.elems)
    assert same_bits(values, expected(raw, name))


@pytest.mark.parametrize("name", QUANTIZED)
def test_extreme_blocks(name: str) -> None:
    raw = extreme_blocks(name)
    assert same_bits(dequantize(raw, BY_NAME[name][1], F32), expected(raw, name))


@dataclass(frozen=True)
class Blocks:
    """Stored rows as a source of quantized ones."""

    block: BlockType
    raw: np.ndarray
    columns: None = None
    row_step: int = 1

    @property
    def format(self) -> RowFormat:
        form = self.block.row_format(self.raw.shape[1] // self.block.nbytes * self.block.elems)
        assert form is not None
        return form

    @property
    def size_out(self) -> int:
        return len(self.raw)

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        return self.block.quantized_rows(self.raw[start:stop], self.format)


@pytest.mark.parametrize("name", QUANTIZED)
def test_packed_matrices_stand_for_the_same_values(name: str) -> None:
    block = BY_NAME[name][1]
    extreme = extreme_blocks(name)
    extreme = extreme[[Blocks(block, raw[None]).quantized_rows(0, 1).finite for raw in extreme]]
    # Rows of three blocks, so that runs of narrow scales do not end with a word.
    raw = np.concatenate(
        [random_rows(name, 8, (19, 3)), extreme[: len(extreme) // 3 * 3].reshape(-1, 3 * block.nbytes)]
    )
    source = Blocks(block, raw)
    tensor = put(source, pack(source, tile=16), dtype=F32, activations="float", device=jax.devices("cpu")[0])
    values, exact = np.asarray(tensor.dequantize()), expected(raw, name)
    # XLA takes subnormal numbers for zero: values, and the least scale of MXFP4.
    tiny = np.abs(exact) < (2**-124 if name == "MXFP4" else np.finfo(np.float32).tiny)
    assert tiny.mean() < 0.7 and not values[tiny & (values != exact)].any()
    assert same_bits(values[~tiny], exact[~tiny])


@pytest.mark.parametrize(("name", "scale"), [("MXFP4", 255), ("NVFP4", 0x80), ("NVFP4", 0xFF)])
def test_scales_that_are_no_numbers(name: str, scale: int) -> None:
    block = BY_NAME[name][1]
    raw = np.zeros((1, block.nbytes), np.uint8)
    raw[0, 0] = scale
    assert not Blocks(block, raw).quantized_rows(0, 1).finite
    assert np.isnan(dequantize(raw, block, F32)[0, 0])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_round_trip_through_the_reference_quantizer(name: str) -> None:
    weights = np.random.default_rng(2).standard_normal((8, 256)).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(BY_NAME[name][0]))
    error = np.abs(dequantize(raw, BY_NAME[name][1], F32) - weights).max()
    assert error < {"Q8_0": 0.03}.get(name, 0.4)


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "F32"])
def test_narrow_results_are_rounded_to_nearest_even(name: str, dtype: np.dtype) -> None:
    block = BY_NAME[name][1]
    raw = np.random.default_rng(3).integers(0, 256, (16, 8 * block.nbytes), dtype=np.uint8)
    f32 = dequantize(raw, block, F32)
    with np.errstate(all="ignore"):
        assert same_bits(dequantize(raw, block, np.dtype(dtype)), f32.astype(dtype))


def test_bfloat16_rounding_from_its_definition() -> None:
    words = np.random.default_rng(4).integers(0, 0x7F000000, 4096, dtype=np.uint32)
    words[:3] = 0x3F808000, 0x3F818000, 0x00000001  # ties to even, down and up; the least denormal
    rounded = ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
    values = dequantize(words.view(np.uint8)[None], BY_NAME["F32"][1], BF16)
    assert np.array_equal(values.view(np.uint16)[0], rounded)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"])
def test_plain_numbers(name: str) -> None:
    block = BY_NAME[name][1]
    assert block.native is not None
    stored = np.array([[0, -1, 2, 100], [3, 5, -7, 11]]).astype(block.native)
    raw = stored.view(np.uint8).reshape(2, -1)
    assert same_bits(dequantize(raw, block, block.native), stored)
    if block.native.kind != "i":
        assert np.array_equal(dequantize(raw, block, F32), stored.astype(np.float32))
    else:
        with pytest.raises(CheckpointError, match="integers"):
            dequantize(raw, block, F32)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "F16"])
@pytest.mark.parametrize("columns", [256, 2 * TILE])
def test_rows_in_another_order(name: str, columns: int) -> None:
    block = BY_NAME[name][1]
    rng = np.random.default_rng(6)
    raw = rng.integers(0, 256, (300 if columns < TILE else 3, columns // block.elems * block.nbytes), dtype=np.uint8)
    order = rng.permutation(len(raw))
    assert same_bits(dequantize(raw, block, F32, row_order=order), dequantize(raw, block, F32)[order])


def test_more_than_one_tile_with_a_remainder() -> None:
    raw = np.random.default_rng(7).integers(0, 256, (3, 34 * (TILE // 64 + 5)), dtype=np.uint8)
    assert same_bits(dequantize(raw, BY_NAME["Q8_0"][1], F32), expected(raw, "Q8_0"))


def test_grids_match_the_reference() -> None:
    for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"):
        kind = getattr(gguf.quants, name)
        kind.init_grid()
        assert np.array_equal(grid(name.lower().replace("_", "")), kind.grid[0, 0])


def test_block_sizes_match_the_reference() -> None:
    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    sizes[9] = (32, 36)  # Q8_1 has two halves in ggml; the package still says two floats
    for type_id, block in GGML_TYPES.items():
        if type_id in sizes:
            assert (block.elems, block.nbytes) == sizes[type_id], block.name


def test_a_known_type_that_cannot_be_read_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"Q8_1 cannot be read; supported are F32, F16, Q4_0"):
        dequantize(np.zeros((1, 36), np.uint8), BY_NAME["Q8_1"][1], F32)
