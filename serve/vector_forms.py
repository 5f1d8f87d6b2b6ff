"""Vectors as a request wants them written: numbers of JSON, or bytes of a type and an order that it names."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import orjson

Vectors = npt.NDArray[np.float32]
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]

TYPES: Mapping[EmbedType, npt.DTypeLike] = MappingProxyType(
    {
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
        "fp8_e5m2": ml_dtypes.float8_e5m2,
    }
)
ORDERS: Mapping[Endianness, Literal["=", "<", ">"]] = MappingProxyType({"native": "=", "little": "<", "big": ">"})


@dataclass(frozen=True)
class VectorForm:
    """How vectors are written.

    Args:
        type: type of the numbers that the bytes hold.
        order: order of a number's bytes; native: this machine's.
    """

    type: EmbedType = "float32"
    order: Endianness = "little"

    def to_bytes(self, vectors: Vectors) -> bytes:
        """Numbers one after another, each rounded to the nearest one of the type, to even where two are as near."""
        with np.errstate(over="ignore"):  # what the type cannot hold is infinite or, in fp8_e4m3, not a number
            numbers = np.ascontiguousarray(vectors.astype(TYPES[self.type]))
        words = numbers.view(f"u{numbers.itemsize}")
        return words.astype(words.dtype.newbyteorder(ORDERS[self.order])).tobytes()

    def to_base64(self, vectors: Vectors) -> str:
        return base64.b64encode(self.to_bytes(vectors)).decode()


def to_json(vectors: Vectors) -> Any:
    """Numbers as fragments of JSON, row by row: nothing else runs while one is written."""
    if vectors.ndim == 2:
        return [to_json(row) for row in vectors]
    return orjson.Fragment(orjson.dumps(np.ascontiguousarray(vectors), option=orjson.OPT_SERIALIZE_NUMPY))
