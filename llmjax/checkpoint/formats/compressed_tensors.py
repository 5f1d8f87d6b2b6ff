"""Checkpoints of llm-compressor, with ``quant_method`` compressed-tensors.

Formats int-quantized, float-quantized and naive-quantized keep one code a byte in ``.weight``; pack-quantized packs
signed codes plus 2^(bits - 1) along in, as ``.weight_packed`` int32 with ``.weight_shape``, and zero points along out;
mxfp4-pack-quantized is ``.weight_packed`` uint8 with E8M0 scales, nvfp4-pack-quantized the same with E4M3 scales and
``.weight_global_scale``. ``.weight_scale`` is for the tensor, rows
(strategy channel), groups of columns or blocks; ``.weight_g_idx`` gives the group of each column.
Source: the compressed-tensors package, compressors/ and quantization/quant_args.py.

Configurations map module names to schemes by patterns. They are not evaluated: a layer's tensors say what they hold,
and one of the declared schemes must agree.

The writer stores weight-only integers as pack-quantized, integers for rounded activations as int-quantized, and float8
as float-quantized, all of which vLLM and transformers read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import ml_dtypes
import numpy as np

from llmjax.checkpoint.formats.fp4 import MXFP4_GROUP, NVFP4_GROUP, MXFP4Planes, open_exponents, open_nvfp4
from llmjax.checkpoint.formats.layout import Layout, StoredRows, Unsigned, scale_type
from llmjax.checkpoint.formats.quantized import (
    I32,
    Module,
    Part,
    Planes,
    QuantizedTensor,
    QuantSettings,
    SavedScheme,
    check_groups,
    unsigned,
)
from llmjax.checkpoint.formats.scaled import ONE_BYTE, ScaledPlanes, as_matrix, open_scaled
from llmjax.errors import CheckpointError, ConfigError
from llmjax.weights.bits import pack_bits, unpack_bits
from llmjax.weights.rows import NUMBER_DTYPES, QuantizedRows
from llmjax.weights.uniform import Float8Scheme, IntegerScheme

BYTES = ("int-quantized", "float-quantized", "naive-quantized")
PACKED = "pack-quantized"
MXFP4 = "mxfp4-pack-quantized"
NVFP4 = "nvfp4-pack-quantized"
FP4_GROUPS = {MXFP4: MXFP4_GROUP, NVFP4: NVFP4_GROUP}
FORMATS = (*BYTES, PACKED, *FP4_GROUPS, "mixed-precision")
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
SCALE, ZERO, PACKED_WEIGHT, G_IDX = ".weight_scale", ".weight_zero_point", ".weight_packed", ".weight_g_idx"
GLOBAL_SCALE = ".weight_global_scale"


@dataclass(frozen=True, eq=False)
class PackedPlanes:
    """weight[o, i] = (code[o, i] - zero[o, group of i]) * scale[o, group of i], both with 2^(bits - 1) added.

    Attributes:
        packed: int32 [out, ceil(in * bits / 32)].
        scales: [out, groups].
        zeros: int32 [ceil(out * bits / 32), groups], or None: all are 0, that is 2^(bits - 1).
        bits: 1 to 8.
        shape: (out, in).
        group_size: consecutive columns that share a scale.
        group_of: intp [in], or None if groups follow each other.
    """

    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    bits: int
    shape: tuple[int, int]
    group_size: int
    group_of: np.ndarray | None = None

    row_step = 32  # zero points of any width start a word again after 32

    @cached_property
    def layout(self) -> Layout:
        form = Unsigned(self.bits)
        return Layout(
            size_in=self.shape[1],
            codes=form.codes,
            group_size=self.group_size,
            scale=scale_type(self.scales.dtype),
            zero=form.middle - form.offset if self.zeros is None else form.zero_type,
            group_of=self.group_of,
        )

    def rows(self, start: int, stop: int) -> StoredRows:
        form, zeros = Unsigned(self.bits), None
        if self.zeros is not None:
            words = self.zeros[start * self.bits // 32 : -(-stop * self.bits // 32)]
            zeros = form.keep(unpack_bits(words.T, self.bits, stop - start).T)
        codes = form.keep(unpack_bits(self.packed[start:stop], self.bits, self.shape[1]))
        return StoredRows(codes, self.scales[start:stop], zeros)


@dataclass(frozen=True)
class DeclaredScheme:
    """How the weights of a group of layers are declared to be stored.

    Attributes:
        form: one of FORMATS but mixed-precision.
        bits: bits of a code.
        is_float: type float rather than int.
        symmetric: no zero points.
        strategy: one of STRATEGIES.
        group_size: for strategies group and tensor_group.
        block: rows and columns, for strategy block.
    """

    form: str
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int = 0
    block: tuple[int, int] | None = None

    @classmethod
    def from_settings(cls, settings: QuantSettings, form: str) -> DeclaredScheme:
        size = settings.value("group_size")
        strategy = settings.choice(
            "strategy", STRATEGIES, "tensor" if size is None else "channel" if size == -1 else "group"
        )
        is_float = settings.choice("type", ("int", "float"), "int") == "float"
        choices = (8,) if form in BYTES else (4,) if form in FP4_GROUPS else tuple(range(1, 9))
        bits = settings.integer("num_bits", default=8, choices=choices)
        if is_float == (form in ("int-quantized", PACKED)) and form != "naive-quantized":
            settings.fail(f"does not go with format {form}", "type")
        grouped = strategy in ("group", "tensor_group")
        group_size = settings.group_size("group_size") if grouped else 0
        if group_size < 0 or group_size != FP4_GROUPS.get(form, group_size):
            settings.fail(
                f"is {group_size}, which does not go with format {form} and strategy {strategy}", "group_size"
            )
        symmetric = settings.flag("symmetric", True)
        if form in FP4_GROUPS and not symmetric:
            settings.fail(f"is false, which does not go with format {form}", "symmetric")
        if (strategy == "tensor_group") != (form == NVFP4):
            settings.fail(f"is {strategy}, which does not go with format {form}", "strategy")
        return cls(
            form=form,
            bits=bits,
            is_float=is_float,
            symmetric=symmetric,
            strategy=strategy,
            group_size=group_size,
            block=settings.sizes("block_structure") if strategy == "block" else None,
        )

    def open(self, module: Module) -> QuantizedTensor:
        planes = self._planes(module)
        kind = self.form[:5].upper() if self.form in FP4_GROUPS else f"{'FLOAT' if self.is_float else 'INT'}{self.bits}"
        return module.quantized(f"CT-{kind}", planes)

    def _planes(self, module: Module) -> Planes:
        if self.form == MXFP4:
            return _open_mxfp4(module)
        if self.form == NVFP4:
            return open_nvfp4(module, packed=PACKED_WEIGHT, scales=SCALE, tensor_scale=GLOBAL_SCALE, reciprocal=True)
        if not self.symmetric and ZERO not in module.parts:
            module.fail("is missing", ZERO)
        if self.symmetric and ZERO in module.parts and module.parts[ZERO].stored.any():  # old files hold zeros
            module.fail("is not 0, but the weights are declared symmetric", ZERO)
        return self._open_packed(module) if self.form == PACKED else self._open_bytes(module)

    def _scale_shapes(self, outputs: int, inputs: int, module: Module) -> tuple[tuple[int, ...], ...]:
        if self.strategy == "tensor":
            return (1,), (), (1, 1)
        if self.strategy == "channel":
            return (outputs, 1), (outputs,)
        if self.block is not None:
            return ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        if inputs % self.group_size:
            module.fail(f"is for {inputs} inputs, not a multiple of the group size {self.group_size}", SCALE)
        return ((outputs, inputs // self.group_size),)

    def _check_scales(self, module: Module, outputs: int, inputs: int) -> np.ndarray:
        scales = module.scales(SCALE)
        shapes = self._scale_shapes(outputs, inputs, module)
        if scales.shape not in shapes:
            needed = f"{outputs} x {inputs} with strategy {self.strategy}"
            module.expect(SCALE, shapes[0], needed)
        return scales

    def _open_bytes(self, module: Module) -> ScaledPlanes:
        stored = "F8_E4M3" if self.is_float else "I8"
        weight = module.array(".weight", stored, dims=2)
        scales = self._check_scales(module, *weight.shape)
        planes = open_scaled(module, SCALE, types=(stored,), block=self.block)
        if self.symmetric:
            return planes
        zeros = module.array(ZERO, "I8")
        module.expect(ZERO, scales.shape, "one for each scale")
        shape = planes.scales.shape
        return ScaledPlanes(weight, planes.scales, planes.block_rows, planes.block_columns, zeros.reshape(shape))

    def _open_packed(self, module: Module) -> PackedPlanes:
        packed = module.array(PACKED_WEIGHT, "I32", dims=2)
        module.array(".weight_shape", "I32", "I64", dims=1)
        module.expect(".weight_shape", (2,), "a matrix")
        outputs, inputs = (int(size) for size in module.parts[".weight_shape"].stored)
        if outputs < 1 or inputs < 1:
            module.fail(f"is [{outputs}, {inputs}]", ".weight_shape")
        words = -(-inputs * self.bits // 32)
        module.expect(PACKED_WEIGHT, (outputs, words), f"{outputs} x {inputs} in {self.bits} bits, densely packed,")
        if self.strategy == "block":
            module.fail("has scales of blocks, which pack-quantized weights cannot have", SCALE)
        scales = self._check_scales(module, outputs, inputs)
        scales = np.broadcast_to(as_matrix(scales), (outputs, as_matrix(scales).shape[1]))
        zeros = None
        if not self.symmetric:
            zeros = module.array(ZERO, "I32", dims=2)
            module.expect(ZERO, (-(-outputs * self.bits // 32), scales.shape[1]), f"{outputs} rows packed along out")
        return PackedPlanes(
            packed=packed,
            scales=scales,
            zeros=zeros,
            bits=self.bits,
            shape=(outputs, inputs),
            group_size=inputs // scales.shape[1],
            group_of=_group_of(module, inputs, scales.shape[1]),
        )


def _group_of(module: Module, inputs: int, groups: int) -> np.ndarray | None:
    if G_IDX not in module.parts:
        return None
    g_idx = module.array(G_IDX, "I32", dims=1)
    module.expect(G_IDX, (inputs,), f"{inputs} inputs")
    if (g_idx == -1).all():  # written, but never set
        return None
    if g_idx.min() < 0 or g_idx.max() >= groups:
        module.fail(f"names groups {g_idx.min()} to {g_idx.max()}, but there are {groups}", G_IDX)
    return g_idx.astype(np.intp)


def _open_mxfp4(module: Module) -> MXFP4Planes:
    packed = module.array(PACKED_WEIGHT, "U8", dims=2)
    exponents = open_exponents(module, SCALE, dims=2)
    if packed.shape[1] * 2 % MXFP4_GROUP:
        module.fail(f"has {packed.shape[1] * 2} columns, not a multiple of {MXFP4_GROUP}", PACKED_WEIGHT)
    module.expect(SCALE, (len(packed), packed.shape[1] * 2 // MXFP4_GROUP), f"groups of {MXFP4_GROUP}")
    return MXFP4Planes(packed, exponents)


@dataclass(frozen=True)
class CompressedTensors:
    """The settings that say how to read the tensors.

    Attributes:
        schemes: those of all configuration groups.
        ignored: modules that are declared not to be quantized, as far as they are named in full.
    """

    schemes: tuple[DeclaredScheme, ...]
    ignored: frozenset[str]

    name = "compressed-tensors"
    plain_part = ".weight"
    parts = (
        ".weight",
        PACKED_WEIGHT,
        SCALE,
        ZERO,
        ".weight_shape",
        G_IDX,
        GLOBAL_SCALE,
        ".input_scale",
        ".input_global_scale",
        ".input_zero_point",
        ".output_scale",
        ".output_zero_point",
    )

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> CompressedTensors:
        form = settings.choice("format", FORMATS)
        sparsity = settings.child("sparsity_config")
        if sparsity is not None and sparsity.values:
            sparsity.choice("format", ("dense",), "dense")
        for key in ("transform_config",):
            if settings.value(key):
                settings.fail("is given; transformed weights are not supported", key)
        groups = settings.child("config_groups")
        if groups is None or not groups.values:
            settings.fail("is missing or empty", "config_groups")
        schemes = []
        for key in groups.values:
            group = groups.child(key)
            if group is None or (weights := group.child("weights")) is None:
                groups.fail("has no weights", key)
            schemes.append(
                DeclaredScheme.from_settings(
                    weights, group.choice("format", FORMATS[:-1], None if form == FORMATS[-1] else form)
                )
            )
        ignored = settings.value("ignore") or []
        if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
            settings.fail("is not a list of names", "ignore")
        return cls(tuple(dict.fromkeys(schemes)), frozenset(ignored))

    def is_quantized(self, module: Module) -> bool:
        if PACKED_WEIGHT in module.parts or SCALE in module.parts:
            return True
        return ".weight" in module.parts and module.parts[".weight"].type_name in ONE_BYTE

    def open(self, module: Module) -> QuantizedTensor:
        if module.name in self.ignored:
            module.fail("is quantized, but the module is on the ignore list", SCALE)
        errors = []
        for scheme in self.schemes:
            try:
                return scheme.open(module)
            except CheckpointError as error:
                errors.append(error)
        raise errors[0]


VERSION = "0.20.0"  # of the package whose format this is
F32, I8, E4M3 = np.dtype(np.float32), np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
DYNAMIC_TOKENS = {"strategy": "token", "dynamic": True, "symmetric": True, "group_size": None, "observer": None}


@dataclass(frozen=True)
class CompressedTensorsWriter:
    """A `LayerWriter`."""

    name: str = "compressed-tensors"

    def kept(self, scheme: SavedScheme, dtype: np.dtype) -> SavedScheme:
        """See `LayerWriter`. Engines load scales of packed weights in the model's dtype, others in float32."""
        if _form(scheme) == PACKED:
            assert isinstance(scheme, IntegerScheme)
            return replace(scheme, scale=scale_type(dtype))
        if isinstance(scheme, IntegerScheme) and (scheme.group_size or not scheme.symmetric):
            raise ConfigError(f"{scheme.name} has one scale for each row and no zero points: leave out the group size")
        return scheme

    def parts(self, scheme: SavedScheme, shape: tuple[int, int]) -> Mapping[str, Part]:
        """See `LayerWriter`."""
        if isinstance(scheme, Float8Scheme):
            scales = Part((1,), F32, _first_scale) if scheme.per_tensor else Part((shape[0], 1), F32, _scales)
            return {".weight": Part(shape, E4M3, _codes), SCALE: scales}
        if _form(scheme) != PACKED:
            return {".weight": Part(shape, I8, _codes), SCALE: Part((shape[0], 1), F32, _scales)}
        check_groups(scheme, shape[1])
        outputs, inputs, bits = *shape, scheme.bits
        form = scheme.format(inputs)
        parts = {
            PACKED_WEIGHT: Part((outputs, -(-inputs * bits // 32)), I32, partial(_packed, bits=bits)),
            SCALE: Part((outputs, form.num_groups), NUMBER_DTYPES[form.scale], _scales),
            ".weight_shape": Part((2,), np.dtype("<i8"), lambda rows: np.array(shape, "<i8")),
        }
        if not scheme.symmetric:
            zeros = (-(-outputs * bits // 32), form.num_groups)
            parts[ZERO] = Part(zeros, I32, partial(_packed_zeros, bits=bits))
        return parts

    def settings(
        self, layers: Mapping[str, SavedScheme], ignored: Sequence[str], *, never: Sequence[str] = ("lm_head",)
    ) -> dict[str, Any]:
        """See `LayerWriter`. The scheme of most layers is that of every Linear; others are named one by one."""
        by_scheme: dict[SavedScheme, list[str]] = {}
        for module, scheme in layers.items():
            by_scheme.setdefault(scheme, []).append(module)
        most = max(by_scheme, key=lambda scheme: len(by_scheme[scheme]))
        groups = {
            f"group_{i}": _group(scheme, ["Linear"] if scheme is most else by_scheme[scheme])
            for i, scheme in enumerate(sorted(by_scheme, key=lambda scheme: scheme is not most))
        }
        forms = {_form(scheme) for scheme in by_scheme}
        return {
            "quant_method": self.name,
            "version": VERSION,
            "quantization_status": "compressed",
            "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": groups,
            "ignore": list(ignored),
        }


def _form(scheme: SavedScheme) -> str:
    if isinstance(scheme, Float8Scheme):
        return "float-quantized"
    return PACKED if scheme.activations == "auto" else "int-quantized"


def _group(scheme: SavedScheme, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {"dynamic": False, "observer": "minmax", "actorder": None, "block_structure": None}
    activations: dict[str, Any] | None = None
    if isinstance(scheme, Float8Scheme):
        weights |= {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
        weights["strategy"] = "tensor" if scheme.per_tensor else "channel"
        activations = {"num_bits": 8, "type": "float", **DYNAMIC_TOKENS}
    else:
        weights |= {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric}
        weights |= {"strategy": "group" if scheme.group_size else "channel", "group_size": scheme.group_size or None}
        if _form(scheme) != PACKED:
            activations = {"num_bits": 8, "type": "int", **DYNAMIC_TOKENS}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": _form(scheme),
    }


def _codes(rows: QuantizedRows) -> np.ndarray:
    return rows.codes


def _scales(rows: QuantizedRows) -> np.ndarray:
    return rows.scales


def _first_scale(rows: QuantizedRows) -> np.ndarray:
    return rows.scales[0]


def _packed(rows: QuantizedRows, bits: int) -> np.ndarray:
    return pack_bits(unsigned(rows.codes), bits)


def _packed_zeros(rows: QuantizedRows, bits: int) -> np.ndarray:
    assert rows.zeros is not None
    return pack_bits(unsigned(rows.zeros).T, bits).T
