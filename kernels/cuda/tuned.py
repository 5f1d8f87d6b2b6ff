"""How kernels divide their work on a card where that was measured: a JSON table for each card, in ``tuned/``.

``python -m benchmarks.tune_gpu`` writes a table. Where a card has none, or it has no entry for a kernel, a format and
sizes (each rounded up to a power of two), arithmetic decides as it does without tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import jax

from llmjax.kernels.cuda.lowering import power_of_2
from llmjax.kernels.row_format import RowFormat

PLENTY = 160 << 10  # bytes of shared memory

FOLDER = Path(__file__).parent / "tuned"

Division = TypeVar("Division")  # a frozen dataclass of numbers


class TableError(ValueError):
    """A table that cannot be used; one line that names file and entry."""


@dataclass(frozen=True)
class Key:
    """What an entry is for."""

    kernel: str
    form: str  # how what it reads is stored
    sizes: tuple[int, ...]  # powers of two

    @classmethod
    def of(cls, kernel: str, form: str, *sizes: int) -> Key:
        return cls(kernel, form, tuple(power_of_2(size) for size in sizes))


@dataclass(frozen=True)
class Table:
    """What was measured on a card."""

    path: Path
    card: str
    choices: Mapping[Key, Mapping[str, int]]

    @classmethod
    def read(cls, path: Path) -> Table:
        """Reads a file.

        Raises:
            TableError: it is not what ``benchmarks.tune_gpu`` writes.
        """
        try:
            content = json.loads(path.read_text())
            card, choices = content["card"], {}
            for number, entry in enumerate(content["entries"]):
                choice = entry["choice"]
                if not all(type(value) is int and value >= 0 for value in choice.values()):
                    raise TableError(f"{path}: entry {number} has a choice that is not a number from 0 up")
                choices[Key(entry["kernel"], entry["format"], tuple(entry["sizes"]))] = choice
        except TableError:
            raise
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise TableError(f"{path}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise TableError(f"{path}: is not a table of divisions: {error!r}") from error
        return cls(path, card, choices)

    def changed(self, division: Division, key: Key) -> Division:
        """A division as the table has it.

        Raises:
            TableError: the entry names something that the kernel does not have.
        """
        choice = self.choices.get(key, {})
        names = {field.name for field in fields(division)}  # type: ignore[arg-type]
        if unknown := sorted(set(choice) - names):
            raise TableError(f"{self.path}: {key.kernel} has no {', '.join(unknown)}")
        return replace(division, **choice)  # type: ignore[type-var]


def path_for(card: str) -> Path:
    """Where a card's table lies."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', card.lower()).strip('-')}.json"


@cache
def table_of(card: str) -> Table | None:
    """The table that ships for a card, by the name that JAX gives it."""
    path = path_for(card)
    return Table.read(path) if path.exists() else None


def default_device() -> jax.Device:
    """The device for which programs are lowered, unless their arguments are elsewhere."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def little_shared_memory() -> bool:
    """Whether programs on the default device have 99 KiB, as on cards for desktops (compute capabilities 8.6, 8.9 and
    12), and not the 163 or 227 of A100, H100 and B200."""
    return getattr(default_device(), "shared_memory_per_block_optin", PLENTY) < PLENTY


def table_in_use() -> Table | None:
    """The table of the default device, which an engine sets while it lowers programs (``jax.default_device``)."""
    device = default_device()
    return table_of(device.device_kind) if device.platform == "gpu" else None


def tuned(division: Division, key: Key) -> Division:
    """A division, with what was measured on this machine's card in place of arithmetic."""
    table = table_in_use()
    return division if table is None else table.changed(division, key)


def describe(card: str) -> str:
    """One line about a card's table."""
    table = table_of(card)
    if table is None:
        return f"none for {card}: block sizes by arithmetic; `python -m benchmarks.tune_gpu` measures them"
    return f"{table.path.name}, {len(table.choices)} entries"


def form_name(form: RowFormat) -> str:
    """A `RowFormat` but for its size, for keys."""
    group = "row" if form.num_groups == 1 else str(form.group_size)
    parts = [f"{form.codes.kind}{form.codes.bits}", group, form.scale]
    parts += [f"zero {form.zero}"] * bool(form.zero) + [f"minimum {form.minimum}"] * bool(form.minimum)
    parts += [f"{len(form.codes.levels)} levels"] * bool(form.codes.levels)
    parts += [f"super {form.super_size if form.num_supers > 1 else 'row'} {form.super_scale}"] * bool(form.super_size)
    return ", ".join(parts)
