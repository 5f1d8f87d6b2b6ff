"""Reports on a quantized model: how far weights and outputs are from the original ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Difference:
    """Sums of squares over the same elements, so that those of several tensors add up.

    Attributes:
        error: sum of squares of new minus old.
        total: sum of squares of the old elements.
    """

    error: float = 0.0
    total: float = 0.0

    @classmethod
    def between(cls, new: np.ndarray, old: np.ndarray) -> Difference:
        """The difference of two arrays of one shape."""
        old = np.asarray(old, np.float32)
        gap = np.asarray(new, np.float32) - old
        return cls(float(np.vdot(gap, gap)), float(np.vdot(old, old)))

    def __add__(self, other: Difference) -> Difference:
        return Difference(self.error + other.error, self.total + other.total)

    @property
    def relative(self) -> float:
        """Norm of the error divided by the norm of the old elements; 0 if both are 0."""
        if not self.error:
            return 0.0
        return math.sqrt(self.error / self.total) if self.total else math.inf


@dataclass
class Tally:
    """Sums over the tensors that are stored in one way."""

    tensors: int = 0
    weights: int = 0
    before: int = 0  # bytes
    after: int = 0
    difference: Difference | None = None

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.after / self.weights


@dataclass
class Outputs:
    """Output errors of one kind of projection over all layers."""

    nearest: Difference = field(default_factory=Difference)
    calibrated: Difference = field(default_factory=Difference)
    worst: float = 0.0
    worst_layer: str = ""


@dataclass
class QuantizationReport:
    """A report that is filled while tensors are written.

    Attributes:
        target: path of the model that was written.
        method: method of calibration, or ``rtn``.
        notes: notes on what the model lacks.
        kinds: sums over tensors by how they are stored.
        outputs: output errors of calibrated projections by kind.
    """

    target: Path
    method: str
    notes: list[str] = field(default_factory=list)
    kinds: dict[str, Tally] = field(default_factory=dict)
    outputs: dict[str, Outputs] = field(default_factory=dict)

    def add(self, kind: str, *, weights: int, before: int, after: int, difference: Difference | None = None) -> None:
        """Counts a tensor."""
        tally = self.kinds.setdefault(kind, Tally())
        tally.tensors += 1
        tally.weights += weights
        tally.before += before
        tally.after += after
        if difference is not None:
            tally.difference = (tally.difference or Difference()) + difference

    def add_calibrated(self, name: str, nearest: Difference, calibrated: Difference) -> None:
        """Counts a projection, such as ``model.layers.3.mlp.up_proj.weight``."""
        parts = name.split(".")
        found = self.outputs.setdefault(parts[-2], Outputs())
        found.nearest += nearest
        found.calibrated += calibrated
        if calibrated.relative > found.worst:
            found.worst, found.worst_layer = calibrated.relative, parts[2]

    @property
    def total(self) -> Tally:
        """Sums over all tensors."""
        total = Tally()
        for tally in self.kinds.values():
            total.tensors += tally.tensors
            total.weights += tally.weights
            total.before += tally.before
            total.after += tally.after
        return total

    def fields(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "target": str(self.target),
            "method": self.method,
            "stored": {kind: _fields(tally) for kind, tally in self.kinds.items()},
            "total": _fields(self.total),
            "output_errors": {
                kind: {
                    "rtn": outputs.nearest.relative,
                    self.method: outputs.calibrated.relative,
                    "worst": outputs.worst,
                    "worst_layer": int(outputs.worst_layer),
                }
                for kind, outputs in self.outputs.items()
            },
            "notes": self.notes,
        }


def _fields(tally: Tally) -> dict[str, Any]:
    return {
        "tensors": tally.tensors,
        "weights": tally.weights,
        "bytes_before": tally.before,
        "bytes_after": tally.after,
        "bits_per_weight": tally.bits,
        "relative_error": None if tally.difference is None else tally.difference.relative,
    }
