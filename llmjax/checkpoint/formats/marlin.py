"""GPTQ checkpoints that AutoGPTQ or GPTQModel repacked for the Marlin kernel (``checkpoint_format`` marlin).

A layer is ``.B`` int32 [in / 16, out * 2] and ``.s`` [groups, out], 4-bit codes with zero point 8. Each row of words is
a stream of codes, 1024 for every 64 outputs: four tiles of 16 inputs x 16 outputs, shuffled for one kernel's threads.
Scales are shuffled within runs of 64, or of 32 where there is one group.
Source: AutoGPTQ's auto_gptq/nn_modules/qlinear/qlinear_marlin.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, StoredRows, Unsigned, scale_type
from llmjax.checkpoint.formats.quant_settings import QuantSettings
from llmjax.checkpoint.formats.quantized import Module, QuantizedTensor
from llmjax.weights.bits import unpack_bits

TILE = 16
RUN = 64  # outputs whose codes are shuffled together
FORM = Unsigned(4)


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
    places = np.empty((RUN, TILE), np.intp)
    places[TILE * tile + outputs, inputs] = stream
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

    row_step = RUN

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[1] // 2, self.words.shape[0] * TILE

    @property
    def layout(self) -> Layout:
        inputs = self.shape[1]
        return Layout(
            size_in=inputs,
            codes=FORM.codes,
            group_size=inputs // len(self.scales),
            scale=scale_type(self.scales.dtype),
            zero=FORM.middle,
        )

    def rows(self, start: int, stop: int) -> StoredRows:
        inputs, runs = self.shape[1], (stop - start) // RUN
        stream = unpack_bits(self.words[:, 2 * start : 2 * stop], 4, (stop - start) * TILE)
        codes = stream.reshape(-1, runs, RUN * TILE).take(_code_places(), axis=2)
        groups = len(self.scales)
        scales = self.scales[:, start:stop].reshape(groups, runs, RUN).take(_scale_places(groups), axis=2)
        return StoredRows(
            codes=codes.reshape(-1, runs, RUN, TILE).transpose(1, 2, 0, 3).reshape(stop - start, inputs),
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
        if words.shape[1] % (2 * RUN):
            module.fail(f"has shape {list(words.shape)}, which is no whole number of runs of {RUN} outputs", ".B")
        outputs, inputs = words.shape[1] // 2, words.shape[0] * TILE
        group_size = inputs if self.group_size < 0 else self.group_size
        if inputs % group_size:
            module.fail(f"has {inputs} inputs, not a multiple of the group size {group_size}", ".B")
        module.expect(".s", (inputs // group_size, outputs), f"{outputs} x {inputs} in groups of {group_size}")
        return module.quantized("Marlin-4", MarlinPlanes(words, scales))
