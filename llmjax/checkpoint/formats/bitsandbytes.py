"""bitsandbytes checkpoints: NF4 and FP4 in 4 bits, or int8.

4 bits: ``.weight`` holds a byte for every two weights of the flattened [out, in] matrix, the higher half first;
weight = quant_map[code] * absmax[index // blocksize]. ``.weight.absmax`` is f32, or with double quantization uint8 a:
nested_quant_map[a] * nested_absmax[block // nested_blocksize] + nested_offset. Sizes are in the JSON text that the
bytes of ``.weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``) spell.
8 bits: ``.weight`` int8 [out, in] and ``.SCB`` f32 [out]: weight = code * SCB / 127.
Source: bitsandbytes' functional.py and nn/modules.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor, QuantSettings
from llmjax.checkpoint.formats.scaled import ScaledPlanes
from llmjax.kernels.row_format import Codes

STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
STORAGE = ("U8", "I8", "F16", "BF16", "F32")  # bnb_4bit_quant_storage: bytes, whatever the type says


@dataclass(frozen=True, eq=False)
class NestedScales:
    """Attributes: `levels` f32 [256]; `absmax` f32, one for every `blocksize` scales; `offset` added to each."""

    levels: np.ndarray
    absmax: np.ndarray
    blocksize: int
    offset: np.float32


@dataclass(frozen=True, eq=False)
class FourBitPlanes:
    """Attributes: as above, `packed` as uint8 [bytes], `levels` f32 [16]; `nested` if `absmax` is quantized."""

    packed: np.ndarray
    absmax: np.ndarray
    levels: np.ndarray
    blocksize: int
    shape: tuple[int, int]
    nested: NestedScales | None = None

    row_step = 2  # of which one starts with a byte, even where rows have an odd length

    def scales(self, first: int, last: int) -> np.ndarray:
        """f32 scales of blocks `first` to `last`."""
        stored = self.absmax[first:last]
        if self.nested is None:
            return stored
        outer = self.nested.absmax[np.arange(first, last) // self.nested.blocksize]
        return self.nested.levels.take(stored) * outer + self.nested.offset

    @property
    def group_size(self) -> int:
        """Columns that share a scale in every row: blocks may run on from one row into the next."""
        return gcd(self.shape[1], self.blocksize)

    @cached_property
    def layout(self) -> Layout:
        return Layout(
            size_in=self.shape[1],
            codes=Codes(4, levels=tuple(self.levels.tolist())),
            group_size=self.group_size,
            scale="f32",
        )

    def rows(self, start: int, stop: int) -> StoredRows:
        columns = self.shape[1]
        begin, end = start * columns, stop * columns
        data = self.packed[begin // 2 : -(-end // 2)]
        codes = np.empty((len(data), 2), np.uint8)
        np.right_shift(data, 4, out=codes[:, 0])
        np.bitwise_and(data, 15, out=codes[:, 1])
        first = begin // self.blocksize
        scales = self.scales(first, -(-end // self.blocksize))
        if self.group_size < self.blocksize:
            scales = scales[np.arange(begin, end, self.group_size) // self.blocksize - first]
        return StoredRows(
            codes=codes.reshape(-1)[: end - begin].reshape(-1, columns),
            scales=scales.reshape(stop - start, -1),
        )


@dataclass(frozen=True)
class BitsAndBytes:
    """The settings that say how to read the tensors.

    Attributes:
        four_bit: load_in_4bit rather than load_in_8bit.
        kind: ``nf4`` or ``fp4``, for 4 bits.
    """

    four_bit: bool
    kind: str

    name = "bitsandbytes"
    plain_part = ".weight"
    parts = (
        ".weight",
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *STATES,
        ".SCB",
        ".weight_format",
    )

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> BitsAndBytes:
        four, eight = settings.flag("load_in_4bit", False), settings.flag("load_in_8bit", False)
        if four == eight:
            settings.fail("or load_in_8bit must be true, and not both", "load_in_4bit")
        return cls(four, settings.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4") if four else "")

    def is_quantized(self, module: Module) -> bool:
        if self.four_bit:
            return any(part.startswith(".weight.") for part in module.parts)
        return ".SCB" in module.parts or (".weight" in module.parts and module.parts[".weight"].type_name == "I8")

    def open(self, module: Module) -> QuantizedTensor:
        if not self.four_bit:
            return module.quantized("BNB-INT8", _open_int8(module))
        state_part = f".weight.quant_state.bitsandbytes__{self.kind}"
        text = module.array(state_part, "U8", dims=1).tobytes()
        where = f"{module.parts[state_part].path}: tensor {module.name + state_part!r}"
        try:
            state = json.loads(text)
        except (ValueError, RecursionError) as error:
            module.fail(f"is not valid JSON: {error}", state_part)
        if not isinstance(state, dict):
            module.fail("is not a JSON object", state_part)
        return module.quantized(f"BNB-{self.kind.upper()}", _open_four_bit(module, QuantSettings(where, state)))


def _open_int8(module: Module) -> ScaledPlanes:
    weight = module.array(".weight", "I8", dims=2)
    scales = module.scales(".SCB", dims=1)
    module.expect(".SCB", (len(weight),), f"a weight of {len(weight)} rows")
    if ".weight_format" in module.parts and module.array(".weight_format", "U8").any():
        module.fail("says another order than row", ".weight_format")
    return ScaledPlanes(weight, (scales.astype(np.float32) / np.float32(127))[:, None], 1, weight.shape[1])


def _open_four_bit(module: Module, state: QuantSettings) -> FourBitPlanes:
    shape = state.sizes("shape")
    blocksize = state.integer("blocksize")
    if blocksize < 2 or blocksize % 2:
        state.fail(f"is {blocksize}, not an even number", "blocksize")
    packed = np.ascontiguousarray(module.array(".weight", *STORAGE)).reshape(-1).view(np.uint8)
    needed = -(-prod(shape) // 2)
    if len(packed) != needed:
        module.fail(f"has {len(packed)} bytes, but {list(shape)} in 4 bits needs {needed}", ".weight")
    levels = module.scales(".weight.quant_map", dims=1)
    module.expect(".weight.quant_map", (16,), "a 4-bit code")
    blocks = -(-prod(shape) // blocksize)
    nested = None
    if state.value("nested_blocksize") is None:
        absmax = module.scales(".weight.absmax", dims=1)
    else:
        absmax = module.array(".weight.absmax", "U8", dims=1)
        nested = _open_nested(module, state, blocks)
    module.expect(".weight.absmax", (blocks,), f"{list(shape)} in blocks of {blocksize}")
    return FourBitPlanes(
        packed=packed,
        absmax=absmax,
        levels=levels.astype(np.float32),
        blocksize=blocksize,
        shape=shape,
        nested=nested,
    )


def _open_nested(module: Module, state: QuantSettings, blocks: int) -> NestedScales:
    blocksize = state.integer("nested_blocksize")
    if blocksize < 1:
        state.fail(f"is {blocksize}, not a number of scales", "nested_blocksize")
    offset = state.value("nested_offset")
    if type(offset) not in (int, float) or not np.isfinite(offset):
        state.fail(f"is {str(offset)[:60]!r}, not a number", "nested_offset")
    levels = module.scales(".weight.nested_quant_map", dims=1)
    module.expect(".weight.nested_quant_map", (256,), "an 8-bit scale")
    absmax = module.scales(".weight.nested_absmax", dims=1)
    module.expect(".weight.nested_absmax", (-(-blocks // blocksize),), f"{blocks} scales in blocks of {blocksize}")
    with np.errstate(over="ignore"):
        module.check_finite(".weight.nested_absmax", np.abs(levels).max() * np.abs(absmax).max() + np.float32(offset))
    return NestedScales(levels.astype(np.float32), absmax.astype(np.float32), blocksize, np.float32(offset))
