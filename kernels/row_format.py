"""How rows of quantized matrices are stored: small integer codes and their scales in 32-bit words; without JAX.

A row is one record of words, whatever the file format it came from: its codes first, 32 columns in ``bits`` words, then
its scales. So a new file format is a way to fill records, and a kernel is written once for all of them.

    weight[o, i] = scale * (number(code) - zero) - minimum

with scale, zero and minimum of the group of columns that i is in. `qtensor.QTensor.dequantize` is the specification.

Codes of 32 columns: widths 1, 2, 4 and 8 add up to any number of bits (six are four and two), and each such plane of
width w takes w words. In word q of a plane, bits ``8 * b + w * s`` to ``+ w`` belong to column ``4 * (s * w + q) + b``:
masking a word leaves the codes of four consecutive columns in its bytes, which is what integer dot products take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import ml_dtypes

CHUNK = 32  # columns whose codes fill whole words

PLANES: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
)
"""Widths of the planes that codes are split into, by their number of bits; low bits first."""

NUMBER_BITS: Mapping[str, int] = MappingProxyType(
    {"f32": 32, "f16": 16, "bf16": 16, "i16": 16, "u8": 8, "i8": 8, "e4m3": 8, "e8m0": 8}
)
"""Types of scales, minima and zero points; e8m0 is a power of two by its biased exponent, as in OCP MX."""

FLOAT8 = MappingProxyType({"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2})


@dataclass(frozen=True)
class Codes:
    """What the codes of a matrix stand for.

    Attributes:
        bits: bits of a code, a key of PLANES.
        kind: ``uint``; ``int`` (two's complement, 8 bits); ``e4m3`` or ``e5m2`` (8-bit floats).
        levels: the number that each code stands for, of up to 4 bits; empty: the code itself.
    """

    bits: int
    kind: str = "uint"
    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.bits not in PLANES:
            raise ValueError(
                f"codes of {self.bits} bits are not supported; supported are {', '.join(map(str, PLANES))}"
            )
        if self.kind not in ("uint", "int", *FLOAT8) or (self.kind != "uint") != (self.bits == 8):
            raise ValueError(f"codes of {self.bits} bits cannot be {self.kind!r}")
        if self.levels and (self.bits > 4 or len(self.levels) > 1 << self.bits):
            raise ValueError(f"{len(self.levels)} levels for codes of {self.bits} bits; at most 4 bits have levels")


@dataclass(frozen=True)
class RowFormat:
    """How the record of a row is laid out: codes, scales, zeros, minima, super scales, super minima, in this order.

    Attributes:
        size_in: columns.
        codes: what the codes are.
        group_size: consecutive columns that share a scale, a multiple of 16; the last group may be shorter.
        scale: number type of a group's scale.
        zero: subtracted from every number, or the number type of each group's own.
        minimum: number type of a group's minimum; empty: none.
        super_size: columns that share a super scale, a multiple of the group size; scales are multiples of it and
            minima of the super minimum. 0: no such level.
        super_scale: number type of super scales and super minima.
    """

    size_in: int
    codes: Codes
    group_size: int
    scale: str
    zero: int | str = 0
    minimum: str = ""
    super_size: int = 0
    super_scale: str = "f16"

    def __post_init__(self) -> None:
        if self.size_in < 1:
            raise ValueError(f"rows of {self.size_in} columns")
        if self.group_size < 16 or self.group_size % 16:
            raise ValueError(f"groups of {self.group_size} columns; they must be multiples of 16")
        if self.super_size % self.group_size:
            raise ValueError(f"groups of {self.group_size} columns do not divide super groups of {self.super_size}")
        for name in (self.scale, self.minimum or "f32", self.super_scale, self.zero):
            if isinstance(name, str) and name not in NUMBER_BITS:
                raise ValueError(f"number type {name!r} is unknown; known are {', '.join(NUMBER_BITS)}")

    @property
    def num_chunks(self) -> int:
        return -(-self.size_in // CHUNK)

    @property
    def num_groups(self) -> int:
        return -(-self.size_in // self.group_size)

    @property
    def num_supers(self) -> int:
        return -(-self.size_in // self.super_size) if self.super_size else 0

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """Runs of numbers after the codes, by name."""
        counts = [("scales", self.scale, self.num_groups)]
        if isinstance(self.zero, str):
            counts.append(("zeros", self.zero, self.num_groups))
        if self.minimum:
            counts.append(("minima", self.minimum, self.num_groups))
        if self.super_size:
            counts.append(("super_scales", self.super_scale, self.num_supers))
            if self.minimum:
                counts.append(("super_minima", self.super_scale, self.num_supers))
        fields, start = {}, self.num_chunks * self.codes.bits
        for name, number, count in counts:
            fields[name] = Field(number, count, start)
            start += fields[name].num_words
        return MappingProxyType(fields)

    @property
    def num_words(self) -> int:
        """Words of a record."""
        last = list(self.fields.values())[-1]
        return last.start + last.num_words

    @property
    def bits_per_weight(self) -> float:
        return self.num_words * 32 / self.size_in


@dataclass(frozen=True)
class Field:
    """A run of numbers in a record, the first in the low bits of its word."""

    number: str  # a key of NUMBER_BITS
    count: int
    start: int  # word

    @property
    def num_words(self) -> int:
        return -(-self.count * NUMBER_BITS[self.number] // 32)
