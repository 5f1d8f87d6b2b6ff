"""AWQ checkpoints in the GEMM layout, as AutoAWQ writes them.

A layer is ``.qweight`` int32 [in, out / 8] and ``.qzeros`` int32 [groups, out / 8], both packed along out with eight
4-bit codes a word in an order that suits one GPU kernel, and ``.scales`` [groups, out].
weight[o, i] = scales[i // group_size, o] * (code[i, o] - zero[i // group_size, o]).
Source: AutoAWQ's awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
candle-vLLM's convert_awq_marlin.py reorders the zero points for a kernel and changes nothing else, not even the
settings: those of 64 outputs, as 8 x 8, are transposed. That shows in the data: a group's codes lie around its zero
point.
The writer stores 4 bits with zero points, version GEMM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows, Unsigned, scale_type
from llmjax.checkpoint.formats.quantized import (
    I32,
    Module,
    Part,
    QuantizedTensor,
    QuantSettings,
    SavedScheme,
    check_groups,
)
from llmjax.errors import ConfigError
from llmjax.weights.rows import QuantizedRows
from llmjax.weights.uniform import IntegerScheme

logger = logging.getLogger(__name__)

FORM = Unsigned(4)
COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
RUN = 64  # outputs whose zero points candle-vLLM's converter reorders
SAMPLE = 256  # rows that tell the orders apart
STANDARD_ERRORS = 6  # by which the squares of what codes are off their zero points differ in the mean
OTHER_VERSIONS = frozenset({"gemv", "gemv_fast", "marlin", "exllama", "ipex"})


def unpack_words(words: np.ndarray) -> np.ndarray:
    """uint8 [8 n, in] from int32 [n, in]: the eight outputs that each word holds become rows."""
    unsigned = words.view(np.uint32)
    codes = np.empty((len(words), 8, words.shape[1]), np.uint8)
    for nibble, column in enumerate(COLUMN_OF_NIBBLE):
        np.bitwise_and(unsigned >> np.uint32(4 * nibble), 15, out=codes[:, column], casting="unsafe")
    return codes.reshape(-1, words.shape[1])


@dataclass(frozen=True, eq=False)
class AWQPlanes:
    """Attributes: as above; `name`: of the layer, for messages."""

    qweight: np.ndarray
    qzeros: np.ndarray
    scales: np.ndarray
    group_size: int
    name: str = ""

    @property
    def row_step(self) -> int:
        """Rows whose zero points are stored together, in either order."""
        return RUN if self.shape[0] % RUN == 0 else 8

    @cached_property
    def is_reordered(self) -> bool:
        """Whether the zero points of some rows fit their codes better if they are transposed, and not by chance."""
        if self.shape[0] % RUN:
            return False
        rows = self._plain_rows(0, min(self.shape[0], SAMPLE))
        assert rows.zeros is not None
        means = rows.codes.reshape(len(rows.codes), -1, self.group_size).mean(axis=2, dtype=np.float32)
        plain, reordered = (np.square(means - zeros) for zeros in (rows.zeros, transposed(rows.zeros)))
        better = plain - reordered
        if found := bool(better.mean() > STANDARD_ERRORS * better.std() / better.size**0.5):
            logger.info("layer %r: its zero points are in candle-vLLM's order for Marlin kernels", self.name)
        return found

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[1] * 8, self.qweight.shape[0]

    @property
    def layout(self) -> Layout:
        return Layout(
            size_in=self.shape[1],
            codes=FORM.codes,
            group_size=self.group_size,
            scale=scale_type(self.scales.dtype),
            zero=FORM.zero_type,
        )

    def rows(self, start: int, stop: int) -> StoredRows:
        if not self.is_reordered:
            return self._plain_rows(start, stop)
        whole = self._plain_rows(start, start + -(-(stop - start) // RUN) * RUN)
        assert whole.zeros is not None
        count = stop - start
        return StoredRows(whole.codes[:count], whole.scales[:count], transposed(whole.zeros)[:count])

    def _plain_rows(self, start: int, stop: int) -> StoredRows:
        words = slice(start // 8, -(-stop // 8))
        return StoredRows(
            codes=unpack_words(np.ascontiguousarray(self.qweight[:, words].T))[: stop - start],
            scales=self.scales[:, start:stop].T,
            zeros=unpack_words(np.ascontiguousarray(self.qzeros[:, words].T))[: stop - start],
        )


@dataclass(frozen=True)
class AWQ:
    """The settings that say how to read the tensors.

    Attributes:
        group_size: inputs that share a scale; -1: all.
    """

    group_size: int

    name = "AWQ"
    parts = (".qweight", ".qzeros", ".scales")
    plain_part = ".weight"

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> AWQ:
        version = settings.text("version", "gemm")
        if version in OTHER_VERSIONS:
            settings.fail(
                f"is {version!r}, a layout that AutoAWQ packs for one kernel; load the checkpoint's GEMM version",
                "version",
            )
        settings.choice("version", ("gemm",), "gemm")
        settings.integer("bits", "w_bit", choices=(4,))
        if not settings.flag("zero_point", True):
            settings.fail("is false; only AWQ with zero points is supported", "zero_point")
        return cls(group_size=settings.group_size("group_size", "q_group_size"))

    def is_quantized(self, module: Module) -> bool:
        return ".qweight" in module.parts

    def open(self, module: Module) -> QuantizedTensor:
        qweight = module.array(".qweight", "I32", dims=2)
        qzeros = module.array(".qzeros", "I32", dims=2)
        scales = module.scales(".scales", dims=2)
        inputs, words = qweight.shape
        group_size = inputs if self.group_size < 0 else self.group_size
        if inputs % group_size:
            module.fail(f"has {inputs} inputs, not a multiple of the group size {group_size}", ".qweight")
        groups = inputs // group_size
        module.expect(".qzeros", (groups, words), f"{inputs} inputs in groups of {group_size}")
        module.expect(".scales", (groups, words * 8), f"{words * 8} outputs in {groups} groups")
        planes = AWQPlanes(qweight=qweight, qzeros=qzeros, scales=scales, group_size=group_size, name=module.name)
        return module.quantized("AWQ-4", planes)


def transposed(zeros: np.ndarray) -> np.ndarray:
    """Zero points [n, groups] with each run of 64 rows, as 8 x 8, transposed; it undoes itself."""
    return zeros.reshape(-1, 8, 8, zeros.shape[1]).swapaxes(1, 2).reshape(zeros.shape)


def looks_like(settings: Mapping[str, Any]) -> bool:
    """Whether settings without quant_method are AutoAWQ's."""
    return "w_bit" in settings and "q_group_size" in settings


@dataclass(frozen=True)
class AWQWriter:
    """A `LayerWriter`."""

    name: str = "awq"

    def kept(self, scheme: SavedScheme, dtype: np.dtype) -> SavedScheme:
        """See `LayerWriter`."""
        if not isinstance(scheme, IntegerScheme) or scheme.bits != 4 or scheme.symmetric:
            raise ConfigError(f"--format awq cannot hold {scheme.name}: it has 4 bits and zero points (int4_asym)")
        return replace(scheme, scale="f16")

    def parts(self, scheme: SavedScheme, shape: tuple[int, int]) -> Mapping[str, Part]:
        """See `LayerWriter`."""
        assert isinstance(scheme, IntegerScheme)
        outputs, inputs = shape
        check_groups(scheme, inputs)
        if outputs % 8:
            raise ConfigError(f"{outputs} rows do not fill the words of --format awq")
        groups = scheme.format(inputs).num_groups

        def zeros(rows: QuantizedRows) -> np.ndarray:
            assert rows.zeros is not None
            return pack_words(rows.zeros)

        return {
            ".qweight": Part((inputs, outputs // 8), I32, lambda rows: pack_words(rows.codes)),
            ".qzeros": Part((groups, outputs // 8), I32, zeros),
            ".scales": Part((groups, outputs), np.dtype(np.float16), lambda rows: rows.scales.T),
        }

    def settings(
        self, layers: Mapping[str, SavedScheme], ignored: Sequence[str], *, never: Sequence[str] = ("lm_head",)
    ) -> dict[str, Any]:
        """See `LayerWriter`."""
        sizes = {scheme.group_size for scheme in layers.values() if isinstance(scheme, IntegerScheme)}
        if len(sizes) > 1:
            raise ConfigError(f"--format awq has one group size for all layers, not {sorted(sizes)}")
        return {
            "quant_method": self.name,
            "version": "gemm",
            "bits": 4,
            "group_size": sizes.pop() or -1,
            "zero_point": True,
            "modules_to_not_convert": list(ignored) or None,
        }


def pack_words(codes: np.ndarray) -> np.ndarray:
    """The inverse of `awq.unpack_words`, transposed: int32 [in, out / 8] from uint8 [out, in]."""
    rows = codes.reshape(-1, 8, codes.shape[1])
    words = np.zeros((len(rows), codes.shape[1]), np.uint32)
    for nibble, column in enumerate(COLUMN_OF_NIBBLE):
        words |= rows[:, column].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(I32).T
