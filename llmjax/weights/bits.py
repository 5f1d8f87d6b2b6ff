"""Small unsigned integers packed into longer words."""

from __future__ import annotations

from math import lcm

import numpy as np


def unpack_bits(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpacks codes from a little-endian bit stream, least significant bits first.

    Code k of a row occupies bits ``bits * k`` to ``bits * (k + 1)`` of its concatenated words, so that codes of 3, 5, 6
    or 7 bits may cross from one word into the next. GPTQ and compressed-tensors pack in this way.

    Args:
        packed: integers [n, words], stored little-endian.
        bits: bits of a code, 1 to 8.
        count: number of codes in a row.

    Returns:
        uint8 [n, count].
    """
    data = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 8:
        return data[:, :count]
    cell = lcm(bits, 8) // 8  # bytes after which the pattern repeats
    codes_per_cell = cell * 8 // bits
    cells = -(-count // codes_per_cell)
    if data.shape[1] < cells * cell:  # the last cell may lack bytes without codes
        data = np.pad(data, ((0, 0), (0, cells * cell - data.shape[1])))
    data = data[:, : cells * cell].reshape(len(data), cells, cell)
    codes = np.empty((len(data), cells, codes_per_cell), np.uint8)
    mask = np.uint8(2**bits - 1)
    for k in range(codes_per_cell):
        byte, shift = divmod(k * bits, 8)
        code = data[:, :, byte] >> np.uint8(shift)
        if shift + bits > 8:
            code |= data[:, :, byte + 1] << np.uint8(8 - shift)
        np.bitwise_and(code, mask, out=codes[:, :, k])
    return codes.reshape(len(data), -1)[:, :count]


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack_bits`.

    Args:
        codes: uint8 [n, count], each below 2^bits.
        bits: bits of a code, 1 to 8.

    Returns:
        int32 [n, ceil(count * bits / 32)], little-endian; bits without a code are 0.
    """
    rows, count = codes.shape
    cell = lcm(bits, 8) // 8
    codes_per_cell = cell * 8 // bits
    cells = -(-count // codes_per_cell)
    codes = np.pad(codes, ((0, 0), (0, cells * codes_per_cell - count))).reshape(rows, cells, codes_per_cell)
    data = np.zeros((rows, cells, cell), np.uint8)
    for k in range(codes_per_cell):
        byte, shift = divmod(k * bits, 8)
        data[:, :, byte] |= codes[:, :, k] << np.uint8(shift)
        if shift + bits > 8:
            data[:, :, byte + 1] |= codes[:, :, k] >> np.uint8(8 - shift)
    packed = np.zeros((rows, -(-count * bits // 32) * 4), np.uint8)
    used = min(packed.shape[1], cells * cell)
    packed[:, :used] = data.reshape(rows, -1)[:, :used]
    return packed.view("<i4")
