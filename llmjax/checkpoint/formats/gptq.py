"""GPTQ checkpoints of AutoGPTQ and GPTQModel, also repacked for the Marlin kernel.

A layer is ``.qweight`` int32 [in * bits / 32, out], packed along in; ``.scales`` [groups, out]; ``.qzeros`` int32
[groups, out * bits / 32], packed along out; and ``.g_idx`` int32 [in], the group of each input (in no order if it was
quantized with desc_act). weight[o, i] = scales[g_idx[i], o] * (code[i, o] - zero[g_idx[i], o]).
Format ``gptq`` stores zeros less one, ``gptq_v2`` as they are. Sources: AutoGPTQ's qlinear_cuda_old.py, GPTQModel's
quantization/config.py. Written is format ``gptq``, groups in order.

With ``checkpoint_format`` marlin a layer is ``.B`` int32 [in / 16, out * 2] and ``.s`` [groups, out], 4-bit codes with
zero point 8. Each row of words is a stream of codes, 1024 for every 64 outputs: four tiles of 16 inputs x 16 outputs,
shuffled for one kernel's threads. Scales are shuffled within runs of 64, or of 32 where there is one group.
Source: AutoGPTQ's auto_gptq/nn_modules/qlinear/qlinear_marlin.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows, Unsigned, scale_type
from llmjax.checkpoint.formats.quantized import I32, Module, Part, QuantizedTensor, QuantSettings, SavedScheme, unsigned
from llmjax.errors import ConfigError
from llmjax.weights.bits import pack_bits, unpack_bits
from llmjax.weights.rows import QuantizedRows
from llmjax.weights.uniform import IntegerScheme

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, eq=False)
class GPTQPlanes:
    """Attributes: as above; `group_of` intp [in] or None if groups of `group_size` follow each other."""

    qweight: np.ndarray
    qzeros: np.ndarray
    scales: np.ndarray
    bits: int
    stores_zero_less_one: bool
    group_size: int
    group_of: np.ndarray | None = None

    row_step = 32  # codes of any width start a word again after 32

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[1], self.qweight.shape[0] * 32 // self.bits

    def zeros(self, start: int, stop: int) -> np.ndarray:
        """uint8 [rows, groups]."""
        first, last = start * self.bits // 32, -(-stop * self.bits // 32)
        zeros = unpack_bits(self.qzeros[:, first:last], self.bits, stop - start).T
        if self.stores_zero_less_one:
            zeros = zeros + np.uint8(1)
            if self.bits != 3:  # AutoGPTQ wraps around, but not where codes cross words
                zeros &= np.uint8(2**self.bits - 1)
        return zeros

    @cached_property
    def layout(self) -> Layout:
        form, zeros = Unsigned(self.bits), self.zeros(0, self.shape[0])
        first = int(zeros[0, 0])
        return Layout(
            size_in=self.shape[1],
            codes=form.codes,
            group_size=self.group_size,
            scale=scale_type(self.scales.dtype),
            zero=first - form.offset if (zeros == first).all() else form.zero_type,
            group_of=self.group_of,
        )

    def rows(self, start: int, stop: int) -> StoredRows:
        # Words change places with rows before they are unpacked: there are fewer of them than of codes.
        words = np.ascontiguousarray(self.qweight[:, start:stop].T)
        form = Unsigned(self.bits)
        return StoredRows(
            codes=form.keep(unpack_bits(words, self.bits, self.shape[1])),
            scales=self.scales[:, start:stop].T,
            zeros=None if isinstance(self.layout.zero, int) else form.keep(self.zeros(start, stop)),
        )


@dataclass(frozen=True)
class GPTQ:
    """The settings that say how to read the tensors.

    Attributes:
        bits: 2, 3, 4 or 8.
        group_size: inputs that share a scale; -1: all.
        desc_act: whether groups are in no order.
        symmetric: whether every zero point is in the middle.
        stores_zero_less_one: format ``gptq``; False for ``gptq_v2``.
        dynamic: whether layers may differ in bits, group size and symmetry; then the tensors' shapes decide.
    """

    bits: int
    group_size: int
    desc_act: bool
    symmetric: bool
    stores_zero_less_one: bool
    dynamic: bool

    name = "GPTQ"
    parts = (".qweight", ".qzeros", ".scales", ".g_idx")
    plain_part = ".weight"

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> GPTQ:
        written = settings.text("checkpoint_format", settings.text("format", "gptq"))
        if written not in ("gptq", "gptq_v2"):
            settings.fail(f"is {written!r}; supported are gptq and gptq_v2", "checkpoint_format")
        settings.choice("pack_dtype", ("int32",), "int32")
        return cls(
            bits=settings.integer("bits", "w_bit", choices=BITS),
            group_size=settings.group_size("group_size", "q_group_size"),
            desc_act=settings.flag("desc_act", False),
            symmetric=settings.flag("sym", False),
            stores_zero_less_one=written == "gptq",
            dynamic=bool(settings.value("dynamic")),
        )

    def is_quantized(self, module: Module) -> bool:
        return ".qweight" in module.parts

    def open(self, module: Module) -> QuantizedTensor:
        qweight = module.array(".qweight", "I32", dims=2)
        scales = module.scales(".scales", dims=2)
        g_idx = module.array(".g_idx", "I32", dims=1) if ".g_idx" in module.parts else None
        bits = self._bits(module, qweight, g_idx)
        outputs, inputs = qweight.shape[1], qweight.shape[0] * 32 // bits
        if qweight.shape[0] * 32 % bits or outputs * bits % 32:
            module.fail(f"has shape {list(qweight.shape)}, which {bits}-bit codes do not fill", ".qweight")
        groups = self._groups(module, inputs, len(scales))
        module.expect(".scales", (groups, outputs), f"{inputs} inputs, {outputs} outputs, group size {self.group_size}")
        qzeros = module.array(".qzeros", "I32", dims=2)
        module.expect(".qzeros", (groups, outputs * bits // 32), f"{groups} groups of {outputs} {bits}-bit zero points")
        group_size = -(-inputs // groups) if self.dynamic or self.group_size < 0 else self.group_size
        planes = GPTQPlanes(
            qweight=qweight,
            qzeros=qzeros,
            scales=scales,
            bits=bits,
            stores_zero_less_one=self.stores_zero_less_one,
            group_size=group_size,
            group_of=self._group_of(module, g_idx, inputs, groups, group_size),
        )
        if self.symmetric and not self.dynamic:
            self._check_middle(module, planes)
        return module.quantized(f"GPTQ-{bits}", planes)

    def _bits(self, module: Module, qweight: np.ndarray, g_idx: np.ndarray | None) -> int:
        if not self.dynamic or g_idx is None:
            return self.bits
        bits, rest = divmod(qweight.shape[0] * 32, len(g_idx))
        if rest or bits not in BITS:
            module.fail(
                f"has {qweight.shape[0]} words for {len(g_idx)} inputs, which fits no number of bits", ".qweight"
            )
        return bits

    def _groups(self, module: Module, inputs: int, found: int) -> int:
        if self.dynamic:
            return found
        return 1 if self.group_size < 0 else -(-inputs // self.group_size)

    def _group_of(
        self, module: Module, g_idx: np.ndarray | None, inputs: int, groups: int, group_size: int
    ) -> np.ndarray | None:
        if g_idx is None:
            if self.desc_act and groups > 1:
                module.fail("is missing, but desc_act is true", ".g_idx")
            return None
        module.expect(".g_idx", (inputs,), f"{inputs} inputs")
        if g_idx.min() < 0 or g_idx.max() >= groups:
            module.fail(f"names groups {g_idx.min()} to {g_idx.max()}, but there are {groups}", ".g_idx")
        if np.array_equal(g_idx, np.arange(inputs) // group_size):
            return None
        return g_idx.astype(np.intp)

    def _check_middle(self, module: Module, planes: GPTQPlanes) -> None:
        """Refuses a file that names the wrong version of the format: its zero points are off by one."""
        middle = 2 ** (self.bits - 1)
        zeros = planes.zeros(0, planes.shape[0])
        if (zeros != middle).any():
            other = "gptq_v2" if self.stores_zero_less_one else "gptq"
            version = "gptq" if self.stores_zero_less_one else "gptq_v2"
            module.fail(
                f"has zero points {zeros.min()} to {zeros.max()}, but sym is true, which means {middle}; "
                f"is checkpoint_format {other} rather than {version}?",
                ".qzeros",
            )


def looks_like(settings: Mapping[str, Any]) -> bool:
    """Whether settings without quant_method are AutoGPTQ's."""
    return "bits" in settings and ("desc_act" in settings or "damp_percent" in settings)


@dataclass(frozen=True)
class GPTQWriter:
    """A `LayerWriter`."""

    name: str = "gptq"

    def kept(self, scheme: SavedScheme, dtype: np.dtype) -> SavedScheme:
        """See `LayerWriter`."""
        if not isinstance(scheme, IntegerScheme) or scheme.activations != "auto":
            raise ConfigError(f"--format gptq cannot hold {scheme.name}: use compressed-tensors")
        return replace(scheme, scale="f16")

    def parts(self, scheme: SavedScheme, shape: tuple[int, int]) -> Mapping[str, Part]:
        """See `LayerWriter`. The last group may be shorter."""
        assert isinstance(scheme, IntegerScheme)
        outputs, inputs, bits = *shape, scheme.bits
        if inputs * bits % 32 or outputs * bits % 32:
            raise ConfigError(f"a layer of {outputs} x {inputs} does not fill the words of --format gptq")
        groups, group_size = scheme.format(inputs).num_groups, scheme.group_size or inputs

        def zeros(rows: QuantizedRows) -> np.ndarray:
            stored = np.full((outputs, groups), 1 << bits - 1, np.uint8) if rows.zeros is None else unsigned(rows.zeros)
            less_one = (stored - np.uint8(1)) & np.uint8((1 << bits) - 1)
            return pack_bits(np.ascontiguousarray(less_one.T), bits)

        return {
            ".qweight": Part((inputs * bits // 32, outputs), I32, lambda rows: pack_bits(unsigned(rows.codes), bits).T),
            ".qzeros": Part((groups, outputs * bits // 32), I32, zeros),
            ".scales": Part((groups, outputs), np.dtype(np.float16), lambda rows: rows.scales.T),
            ".g_idx": Part((inputs,), I32, lambda rows: (np.arange(inputs) // group_size).astype(I32)),
        }

    def settings(
        self, layers: Mapping[str, SavedScheme], ignored: Sequence[str], *, never: Sequence[str] = ("lm_head",)
    ) -> dict[str, Any]:
        """See `LayerWriter`."""
        scheme = _only(layers, self.name)
        if left := [name for name in ignored if name not in never]:
            raise ConfigError(f"--format gptq quantizes every layer, {left[0]} too: use compressed-tensors")
        return {
            "quant_method": self.name,
            "checkpoint_format": "gptq",
            "bits": scheme.bits,
            "group_size": scheme.group_size or -1,
            "sym": scheme.symmetric,
            "desc_act": False,
            "static_groups": False,
            "true_sequential": True,
            "lm_head": "lm_head" in layers,
        }


def _only(layers: Mapping[str, SavedScheme], name: str) -> IntegerScheme:
    """The one scheme of all layers."""
    schemes = set(layers.values())
    if len(schemes) > 1:
        names = ", ".join(sorted(scheme.name for scheme in schemes))
        raise ConfigError(f"--format {name} has one scheme for all layers, not {names}: use compressed-tensors")
    scheme = schemes.pop()
    assert isinstance(scheme, IntegerScheme)
    return scheme


MARLIN_TILE = 16
MARLIN_RUN = 64  # outputs whose codes are shuffled together
MARLIN_FORM = Unsigned(4)


@cache
def _code_places() -> np.ndarray:
    """intp [1024]: where in the stream the code of (output of 64, input of 16) is."""
    thread, tile, byte, half = np.ogrid[:32, :4, :4, :2]  # a thread's word holds, of each tile, 4 inputs x 2 outputs
    # Nibbles 0 to 3 are the even, 4 to 7 the odd elements of the order (block of 8 outputs, four inputs).
    element = 2 * byte + half
    inputs = 2 * (thread % 4) + element % 2 + 8 * (element // 2 % 2)
    outputs = thread // 4 + 8 * (element // 4)
    nibble = byte + 4 * half
    stream = 32 * thread + 8 * tile + nibble
    places = np.empty((MARLIN_RUN, MARLIN_TILE), np.intp)
    places[MARLIN_TILE * tile + outputs, inputs] = stream
    return places.reshape(-1)


@cache
def _scale_places(groups: int) -> np.ndarray:
    """intp [64]: where in a run of 64 stored scales that of each output is."""
    if groups > 1:
        shuffled = np.arange(64).reshape(8, 8).T.reshape(-1)
    else:
        quarter = np.array([0, 1, 8, 9, 16, 17, 24, 25]) + 2 * np.arange(4)[:, None]
        shuffled = np.concatenate([quarter.reshape(-1), quarter.reshape(-1) + 32])
    return np.argsort(shuffled)


@dataclass(frozen=True, eq=False)
class MarlinPlanes:
    """Attributes: as above, `words` being ``.B`` and `scales` ``.s``."""

    words: np.ndarray
    scales: np.ndarray

    row_step = MARLIN_RUN

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[1] // 2, self.words.shape[0] * MARLIN_TILE

    @property
    def layout(self) -> Layout:
        inputs = self.shape[1]
        return Layout(
            size_in=inputs,
            codes=MARLIN_FORM.codes,
            group_size=inputs // len(self.scales),
            scale=scale_type(self.scales.dtype),
            zero=MARLIN_FORM.middle,
        )

    def rows(self, start: int, stop: int) -> StoredRows:
        inputs, runs = self.shape[1], (stop - start) // MARLIN_RUN
        stream = unpack_bits(self.words[:, 2 * start : 2 * stop], 4, (stop - start) * MARLIN_TILE)
        codes = stream.reshape(-1, runs, MARLIN_RUN * MARLIN_TILE).take(_code_places(), axis=2)
        groups = len(self.scales)
        scales = self.scales[:, start:stop].reshape(groups, runs, MARLIN_RUN).take(_scale_places(groups), axis=2)
        return StoredRows(
            codes=codes.reshape(-1, runs, MARLIN_RUN, MARLIN_TILE).transpose(1, 2, 0, 3).reshape(stop - start, inputs),
            scales=scales.reshape(groups, -1).T,
        )


@dataclass(frozen=True)
class Marlin:
    """The settings that say how to read the tensors.

    Attributes:
        group_size: inputs that share a scale; -1: all.
    """

    group_size: int

    name = "Marlin"
    parts = (".B", ".s", ".workspace")
    plain_part = ".weight"

    @classmethod
    def from_settings(cls, settings: QuantSettings) -> Marlin:
        settings.integer("bits", "w_bit", choices=(4,), default=4)
        if not settings.flag("sym", True):
            settings.fail("is false, but Marlin checkpoints have no zero points", "sym")
        group_size = settings.group_size("group_size", "q_group_size")
        if settings.flag("desc_act", False) and group_size != -1:
            settings.fail("is true, but Marlin checkpoints have their groups in order", "desc_act")
        return cls(group_size)

    def is_quantized(self, module: Module) -> bool:
        return ".B" in module.parts

    def open(self, module: Module) -> QuantizedTensor:
        words = module.array(".B", "I32", dims=2)
        scales = module.scales(".s", dims=2)
        if words.shape[1] % (2 * MARLIN_RUN):
            module.fail(
                f"has shape {list(words.shape)}, which is not a whole number of runs of {MARLIN_RUN} outputs", ".B"
            )
        outputs, inputs = words.shape[1] // 2, words.shape[0] * MARLIN_TILE
        group_size = inputs if self.group_size < 0 else self.group_size
        if inputs % group_size:
            module.fail(f"has {inputs} inputs, not a multiple of the group size {group_size}", ".B")
        module.expect(".s", (inputs // group_size, outputs), f"{outputs} x {inputs} in groups of {group_size}")
        return module.quantized("Marlin-4", MarlinPlanes(words, scales))
