"""Reading the records of a `QTensor` inside a kernel: codes and scales of some chunks of columns and some rows.

Tiles of numbers are [C, N]: C chunks of 32 columns, N rows of the matrix. The code of one column in each chunk comes
out of whole words by a shift and a mask, and becomes a float as the mantissa of a number from 1 to 2, so that reading
a code costs three instructions: converting integers would cost as much as six.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cuda.lowering import load
from llmjax.kernels.row_format import CHUNK, FLOAT8, NUMBER_BITS, PLANES, Codes, Field, RowFormat

MANTISSA = 23  # bits
ONE = 0x3F800000  # bits of 1.0
E2M1 = tuple(sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))  # MXFP4, NVFP4
E2M1_GAIN = 2.0**14  # of the halves that these are read as


@dataclass(frozen=True)
class Place:
    """The part of a matrix that a program looks at."""

    words: Any  # reference, u32 [..., tiles, words of a record, rows of a tile]
    at: tuple[Any, ...]  # i32, which matrix of a stack
    output: jax.Array  # i32 [N], rows of the matrix
    inside: jax.Array  # bool [N], whether it has them
    chunk: jax.Array  # i32 [C]
    num_chunks: int  # of the matrix

    def further(self, chunks: jax.Array) -> Place:
        """The part that is ``chunks`` chunks after this one."""
        return replace(self, chunk=self.chunk + chunks)

    def read(self, word: jax.Array) -> jax.Array:
        """Words i32 [C] of the records, u32 [C, N]; zeros outside the matrix."""
        tile = self.words.shape[-1]
        index = (
            *self.at,
            jax.lax.div(self.output, np.int32(tile))[None],
            word[:, None],
            jax.lax.rem(self.output, np.int32(tile))[None],
        )
        return load(self.words, index, (self.chunk < self.num_chunks)[:, None] & self.inside[None])

    def beside(self, number: jax.Array) -> jax.Array:
        """A number of each chunk, [C], as it meets what `read` gives."""
        return number[:, None]


@dataclass(frozen=True)
class Line:
    """What the floats that codes are read as stand for: ``gain * float + offset``."""

    gain: float
    offset: float


def code_line(codes: Codes) -> Line:
    """How `code_floats` come out."""
    if codes.levels:
        return Line(E2M1_GAIN if codes.levels == E2M1 else 1.0, 0.0)
    if codes.kind in FLOAT8:
        return Line(256.0 if codes.kind == "e4m3" else 1.0, 0.0)
    size = float(1 << codes.bits)
    return Line(size, -size - (128.0 if codes.kind == "int" else 0.0))


@dataclass(frozen=True)
class Run:
    """Columns of a chunk whose codes lie alike in a run of words, and in one group: in word q of the widest plane,
    whose width is w, piece s and byte b is column ``4 * (s * w + q) + b`` (see `llmjax.kernels.row_format`)."""

    half: int  # of the chunk
    words: range
    pieces: range
    width: int

    def column(self, word: Any, piece: int, byte: int) -> Any:
        return 4 * (piece * self.width + word) + byte


def runs(form: RowFormat) -> list[Run]:
    """All columns of a chunk, in one run if it lies in one group, and in two otherwise."""
    width = PLANES[form.codes.bits][0]
    pieces = 8 // width
    if form.num_groups == 1 or form.group_size % CHUNK == 0:
        return [Run(0, range(width), range(pieces), width)]
    if pieces == 1:
        return [Run(half, range(4 * half, 4 * half + 4), range(1), width) for half in (0, 1)]
    half_of = pieces // 2
    return [Run(half, range(width), range(half * half_of, (half + 1) * half_of), width) for half in (0, 1)]


def code_words(place: Place, word: Any, codes: Codes) -> list[jax.Array]:
    """What holds the codes of the columns of a word: u32 [C, N] for each plane.

    Args:
        word: number of a word of the widest plane; an int, or an i32 in a loop.
    """
    planes, low = [], 0
    for width in PLANES[codes.bits]:
        words = place.read(place.chunk * codes.bits + (low + (word & (width - 1))))
        if width < PLANES[codes.bits][0]:  # its words hold the codes of several words of the widest plane
            words = words >> jnp.uint32(word & ~(width - 1))
        planes.append(words)
        low += width
    return planes


def code_floats(words: list[jax.Array], piece: int, byte: int, codes: Codes, levels: Any) -> jax.Array:
    """What the codes of one column of each chunk stand for, up to the format's `code_line`: f32 [C, N].

    Args:
        words: from `code_words`.
        levels: reference, f32 [16]; read if codes have other levels than `E2M1`.
    """
    if codes.kind in FLOAT8:
        return _float8(_code_bits(words, piece, byte, codes.bits, at=0), codes.kind)
    if codes.levels == E2M1:  # a half with other widths of exponent and mantissa
        code = _code_bits(words, piece, byte, codes.bits, at=0)
        half = ((code & np.uint32(8)) << 12 | (code & np.uint32(7)) << 9).astype(jnp.uint16)
        return jax.lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
    if codes.levels:
        return load(levels, (_code_bits(words, piece, byte, codes.bits, at=0).astype(jnp.int32),))
    at = MANTISSA - codes.bits
    bits = _code_bits(words, piece, byte, codes.bits, at=at) | ONE
    if codes.kind == "int":
        bits = bits ^ (0x80 << at)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _code_bits(words: list[jax.Array], piece: int, byte: int, bits: int, *, at: int) -> jax.Array:
    """The codes of a column with their lowest bits at bit ``at``, u32 [C, N]."""
    widest = PLANES[bits][0]
    code, low = None, 0
    for plane, width in zip(words, PLANES[bits], strict=True):
        shift = at + low - (8 * byte + piece * widest)  # piece * (widest / width) pieces of this plane
        moved = (plane << shift if shift >= 0 else plane >> -shift) & np.uint32(((1 << width) - 1) << (at + low))
        code = moved if code is None else code | moved
        low += width
    assert code is not None
    return code


def _float8(bits: jax.Array, kind: str) -> jax.Array:
    """8-bit floats as f32, e4m3 times 2^-8: both are halves with other widths of exponent and mantissa, and halves are
    converted on every card."""
    bits = bits.astype(jnp.uint16)
    half = (bits & 0x80) << 8 | (bits & 0x7F) << 7 if kind == "e4m3" else bits << 8
    return jax.lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)


def weight_line(place: Any, form: RowFormat, half: int, *, line: Line) -> tuple[jax.Array, jax.Array]:
    """Gain and offset, f32 [C, N], that make weights of numbers: ``weight = gain * number + offset``.

    Args:
        place: a `Place`, or what reads words as it does.
        half: 0 or 1; which 16 columns of each chunk. Groups end only there.
        line: what the numbers stand for, such as `code_line` of `code_floats`.
    """
    column = place.chunk * CHUNK + 16 * half

    def read(name: str, size: int) -> jax.Array:
        entry = form.fields[name]
        return _numbers(place, entry, jnp.minimum(jax.lax.div(column, np.int32(size)), entry.count - 1))

    scale = read("scales", form.group_size)
    if form.super_size:
        scale = scale * read("super_scales", form.super_size)
    offset: Any = line.offset - form.zero if not isinstance(form.zero, str) else None
    if offset is None:
        offset = line.offset - read("zeros", form.group_size)
    shift = scale * offset
    if form.minimum:
        minimum = read("minima", form.group_size)
        shift = shift - (minimum * read("super_minima", form.super_size) if form.super_size else minimum)
    return scale * line.gain, shift


def _numbers(place: Any, entry: Field, index: jax.Array) -> jax.Array:
    """Numbers i32 [C] of a run, f32 [C, N]."""
    width = NUMBER_BITS[entry.number]
    if width == 32:
        return jax.lax.bitcast_convert_type(place.read(entry.start + index), jnp.float32)
    per_word = 32 // width
    shift = ((index & (per_word - 1)) * width).astype(jnp.uint32)
    words = place.read(entry.start + jax.lax.div(index, np.int32(per_word)))
    raw = words >> place.beside(shift) & np.uint32((1 << width) - 1)
    match entry.number:
        case "f16":
            return jax.lax.bitcast_convert_type(raw.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
        case "bf16":
            return jax.lax.bitcast_convert_type(raw << 16, jnp.float32)
        case "e8m0":  # exponent 0 stands for 2^-127, which is subnormal
            bits = jnp.where(raw == 0, np.uint32(1 << 22), raw << MANTISSA)
            return jax.lax.bitcast_convert_type(bits, jnp.float32)
        case "e4m3":
            return _float8(raw, "e4m3") * 256
        case "i8" | "i16":
            return (raw.astype(jnp.int32) << 32 - width >> 32 - width).astype(jnp.float32)
    return raw.astype(jnp.int32).astype(jnp.float32)
