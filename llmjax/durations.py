"""Durations as Ollama and Go have them: ``5m``, ``1h30m``, ``-1``."""

from __future__ import annotations

import math
import re

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_WHOLE = re.compile(rf"[+-]?(?:{_PART.pattern})+", re.ASCII)


def parse_duration(value: str | float) -> float:
    """Seconds of a duration; a plain number is seconds; any negative one is infinite.

    Raises:
        ValueError: it is not a duration.
    """
    seconds = float(value) if isinstance(value, int | float) or _is_number(value) else _of_parts(value)
    if math.isnan(seconds):
        raise ValueError(value)
    return math.inf if seconds < 0 else seconds


def _of_parts(text: str) -> float:
    if _WHOLE.fullmatch(text.strip()) is None:
        raise ValueError(text)
    seconds = sum(float(number) * UNITS[unit] for number, unit in _PART.findall(text))
    return -seconds if text.strip().startswith("-") else seconds


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d+(\.\d*)?", text.strip(), re.ASCII) is not None
