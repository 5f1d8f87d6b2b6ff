"""Vectors as bytes, against numpy's types where it has them and the formats' definitions where it has not."""

from __future__ import annotations

import base64
import sys

import numpy as np
import pytest

from llmjax.serve.vector_forms import TYPES, Endianness, VectorForm, to_json

RNG = np.random.default_rng(7)
VECTORS = np.concatenate(
    [
        RNG.normal(0, 1, 500),
        RNG.normal(0, 1e-3, 200),  # among them numbers that fp8 has as subnormal ones
        [0.0, -0.0, 1.0, -1.0, 1.0625, 1.1875, 0.001953125 * 1.5, 448.0, -240.0],  # ties among them
    ]
).astype(np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The upper half of each number's bits, rounded to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def fp8(x: np.ndarray, *, exponent: int, bias: int) -> np.ndarray:
    """The code of the nearest number, of two the even one: sign, ``exponent`` bits, the rest a fraction."""
    fraction = 7 - exponent
    codes = np.arange(128)
    raised, part = codes >> fraction, (codes & (2**fraction - 1)) / 2**fraction
    values = np.where(raised == 0, part * 2.0 ** (1 - bias), (1 + part) * 2.0 ** (raised - bias))
    last = 0x7E if exponent == 4 else 0x7B  # after it: not a number, or infinite
    away = np.abs(np.abs(x.astype(np.float64))[:, None] - values[None, : last + 1])
    order = np.lexsort((np.broadcast_to(codes[: last + 1] % 2, away.shape), away), axis=1)
    return (order[:, 0] | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


EXPECTED = {
    "float32": VECTORS.view(np.uint32),
    "float16": VECTORS.astype(np.float16).view(np.uint16),
    "bfloat16": bfloat16(VECTORS),
    "fp8_e4m3": fp8(VECTORS, exponent=4, bias=7),
    "fp8_e5m2": fp8(VECTORS, exponent=5, bias=15),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("order", ["native", "little", "big"])
def test_exact_bytes(kind: str, order: Endianness) -> None:
    form = VectorForm(kind, order)  # type: ignore[arg-type]
    words = EXPECTED[kind]
    little = sys.byteorder == "little" if order == "native" else order == "little"
    expected = words.astype(words.dtype.newbyteorder("<" if little else ">")).tobytes()
    assert form.to_bytes(VECTORS) == expected
    assert base64.b64decode(form.to_base64(VECTORS)) == expected
    assert form.to_bytes(VECTORS[:708].reshape(12, 59).T) == form.to_bytes(VECTORS[:708].reshape(12, 59).T.copy())


def test_numbers_that_a_type_cannot_hold() -> None:
    large = np.array([1e6, -1e6], np.float32)
    assert np.frombuffer(VectorForm("float16").to_bytes(large), "<f2").tolist() == [np.inf, -np.inf]
    assert VectorForm("fp8_e5m2").to_bytes(large) == b"\x7c\xfc"
    assert VectorForm("fp8_e4m3").to_bytes(large) == b"\x7f\xff"


def test_json_has_rows() -> None:
    assert len(to_json(np.zeros((3, 2), np.float32))) == 3
