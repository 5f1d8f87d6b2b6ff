"""Typed access to the ``<architecture>.*`` keys of a GGUF file, with a check for keys that were not read."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.errors import CheckpointError

LARGEST = float(np.finfo(np.float32).max)

HARMLESS = frozenset(
    {
        *("pooling_type", "tensor_data_layout", "rope.scaling.finetuned"),
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),  # the one of norms that it does not have
    }
)
"""Keys that may be there and do not affect a decoder."""

HARMLESS_PREFIXES = ("vision.", "mm.")  # image encoders packed into the same file; their tensors stay unused

ONLY = {
    "attention.causal": True,
    "attention.max_alibi_bias": 0,
    "attention.clamp_kqv": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.yarn_log_multiplier": 0,
    "use_parallel_residual": False,
}
"""Keys that may only have their default values."""


class ArchitectureKeys:
    """Reads keys below the file's architecture.

    A value may be an array with one element a layer; it must then be the same for every layer.

    Args:
        gguf: a file with ``general.architecture``.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self._path = gguf.path
        self._prefix = f"{gguf.metadata['general.architecture']}."
        self._values = {
            key.removeprefix(self._prefix): value
            for key, value in gguf.metadata.items()
            if key.startswith(self._prefix)
        }
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: key '{self._prefix}{key}' {problem}")

    def value(self, key: str, default: Any = None) -> Any:
        """The raw value.

        Raises:
            CheckpointError: the key is missing and `default` is None.
        """
        self._read.add(key)
        value = self._values.get(key, default)
        if value is None:
            self.fail(key, "is missing")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._one(key, default)
        if type(value) is not int or value < least:
            self.fail(key, f"is {value!r}, not a whole number of at least {least}")
        return value

    def integer_of_some(self, key: str, default: int | None = None) -> int:
        """A number of at least 1 for the layers that it concerns; other layers may have 0."""
        value = self.by_layer(key, default)
        counts = {each for each in value.tolist() if each != 0} if isinstance(value, np.ndarray) else {value}
        if len(counts) > 1:
            self.fail(key, "differs from layer to layer, which is not supported")
        count = counts.pop() if counts else 0
        if type(count) is not int or count < 1:
            self.fail(key, f"is {count!r}, not a whole number of at least 1")
        return count

    def by_layer(self, key: str, default: Any = None) -> Any:
        """A value for all layers, or an array with one for each."""
        value = self.value(key, default)
        if isinstance(value, list):
            self.fail(key, "is a list of strings, not whole numbers")
        return value

    def concerned(self, key: str, layers: int) -> list[bool]:
        """Whether each of ``layers`` has a number other than 0; if one number is there, all have it."""
        value = self.value(key)
        if not isinstance(value, np.ndarray):
            return [value != 0] * layers
        if value.shape != (layers,):
            self.fail(key, f"has {value.size} elements for {layers} layers")
        return [bool(each != 0) for each in value]

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        value = self._one(key, default)
        if type(value) not in (int, float) or not 0 <= value <= LARGEST:
            self.fail(key, f"is {value!r}, not a finite number of at least 0")
        if key not in self._values:
            return float(value)
        # Stored as f32: the shortest decimal that rounds to it is what config.json said (1e-05, not 9.9999997e-06).
        return float(str(np.float32(value)))

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if not value:
            self.fail(key, "is 0, not a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._one(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"is {value!r}, neither true nor false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.value(key, default)
        if not isinstance(value, str):
            self.fail(key, f"is {value!r}, not a string")
        return value

    def only(self, key: str, expected: float) -> None:
        """Accepts a key only if it has the value that is assumed anyway."""
        if key in self._read:
            return
        value = self._one(key, expected)
        if isinstance(value, str | list) or not math.isclose(value, expected, rel_tol=1e-6):
            self.fail(key, f"is {value!r}; this architecture is supported with {expected!r} only")

    def refuse_unread(self) -> None:
        """Refuses keys that no one has read and that are not known to be harmless.

        Raises:
            CheckpointError: naming the first such key.
        """
        for key, expected in ONLY.items():
            self.only(key, expected)
        for key in self._values:
            if key not in self._read | HARMLESS and not key.startswith(HARMLESS_PREFIXES):
                self.fail(key, "is not understood for this architecture")

    def _one(self, key: str, default: Any) -> Any:
        value = self.value(key, default)
        if not isinstance(value, np.ndarray):
            return value
        if not value.size or np.any(value != value[0]):
            self.fail(key, "differs from layer to layer, which is not supported")
        return value[0].item()
