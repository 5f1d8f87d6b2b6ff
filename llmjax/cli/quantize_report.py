"""What ``llmjax quantize`` has done, as a table and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from llmjax.quantization.difference import Difference


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
        """Bits a weight."""
        return 8 * self.after / self.weights


@dataclass
class Outputs:
    """Output errors of one kind of projection over all layers."""

    nearest: Difference = field(default_factory=Difference)
    calibrated: Difference = field(default_factory=Difference)
    worst: float = 0.0
    worst_layer: str = ""


@dataclass
class QuantizeReport:
    """Filled while tensors are written.

    Attributes:
        target: what was written.
        method: of calibration, or ``rtn``.
        notes: on what it lacks.
    """

    target: Path
    method: str
    notes: list[str] = field(default_factory=list)
    _kinds: dict[str, Tally] = field(default_factory=dict)
    _outputs: dict[str, Outputs] = field(default_factory=dict)

    def add(self, kind: str, *, weights: int, before: int, after: int, difference: Difference | None = None) -> None:
        """Counts a tensor."""
        tally = self._kinds.setdefault(kind, Tally())
        tally.tensors += 1
        tally.weights += weights
        tally.before += before
        tally.after += after
        if difference is not None:
            tally.difference = (tally.difference or Difference()) + difference

    def add_calibrated(self, name: str, nearest: Difference, calibrated: Difference) -> None:
        """Counts a projection, ``model.layers.3.mlp.up_proj.weight``."""
        parts = name.split(".")
        outputs = self._outputs.setdefault(parts[-2], Outputs())
        outputs.nearest += nearest
        outputs.calibrated += calibrated
        if calibrated.relative > outputs.worst:
            outputs.worst, outputs.worst_layer = calibrated.relative, parts[2]

    @property
    def total(self) -> Tally:
        """Of everything."""
        total = Tally()
        for tally in self._kinds.values():
            total.tensors += tally.tensors
            total.weights += tally.weights
            total.before += tally.before
            total.after += tally.after
        return total

    def fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "target": str(self.target),
            "method": self.method,
            "stored": {kind: _fields(tally) for kind, tally in self._kinds.items()},
            "total": _fields(self.total),
            "output_errors": {
                kind: {
                    "rtn": outputs.nearest.relative,
                    self.method: outputs.calibrated.relative,
                    "worst": outputs.worst,
                    "worst_layer": int(outputs.worst_layer),
                }
                for kind, outputs in self._outputs.items()
            },
            "notes": self.notes,
        }

    def table(self) -> RenderableType:
        """As people read it."""
        columns = ("stored as", "tensors", "weights", "MB before", "MB after", "bits a weight", "relative error")
        stored = _table(*columns)
        for kind, tally in (*self._kinds.items(), ("total", self.total)):
            stored.add_row(
                kind,
                str(tally.tensors),
                f"{tally.weights:,}",
                f"{tally.before / 1e6:,.1f}",
                f"{tally.after / 1e6:,.1f}",
                f"{tally.bits:.2f}",
                "" if tally.difference is None else f"{tally.difference.relative:.4f}",
            )
        shown: list[RenderableType] = [stored]
        if self._outputs:
            outputs = _table("output error of", "rtn", self.method, "worst", "in layer")
            for kind, found in self._outputs.items():
                outputs.add_row(
                    kind,
                    f"{found.nearest.relative:.4f}",
                    f"{found.calibrated.relative:.4f}",
                    f"{found.worst:.4f}",
                    found.worst_layer,
                )
            shown += ["", outputs]
        return Group(*shown, *(f"note: {note}" for note in self.notes), f"written: {self.target}")


def _fields(tally: Tally) -> dict[str, Any]:
    return {
        "tensors": tally.tensors,
        "weights": tally.weights,
        "bytes_before": tally.before,
        "bytes_after": tally.after,
        "bits_per_weight": tally.bits,
        "relative_error": None if tally.difference is None else tally.difference.relative,
    }


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table
