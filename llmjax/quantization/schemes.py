"""All schemes that quantize weights at load, by the names that users type, and users' rules for single modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llmjax.errors import ConfigError
from llmjax.kernels.row_format import RowFormat
from llmjax.weights import uniform
from llmjax.weights.ggml import reference
from llmjax.weights.rows import QuantizedRows
from llmjax.weights.uniform import UniformScheme


@dataclass(frozen=True)
class BlockScheme:
    """A ggml type, bit for bit as ggml's reference quantizer makes it (a `PackedScheme`)."""

    name: str
    activations: str = "auto"

    def format(self, size_in: int) -> RowFormat:
        """See `UniformScheme`."""
        form = reference.QUANTIZERS[self.name].block.row_format(size_in)
        assert form is not None
        return form

    def quantize(self, rows: np.ndarray) -> QuantizedRows:
        """See `UniformScheme`."""
        raw = reference.quantize(rows, self.name, threads=1)
        return reference.QUANTIZERS[self.name].block.quantized_rows(raw, self.format(rows.shape[1]))

    @property
    def packs(self) -> bool:
        """See `PackedScheme`."""
        quantizer = reference.QUANTIZERS[self.name]
        return quantizer.native and quantizer.block.packs

    def fill(self, rows: np.ndarray, words: np.ndarray) -> None:
        """See `PackedScheme`."""
        raw = reference.quantize(rows, self.name, threads=1)
        reference.QUANTIZERS[self.name].block.pack(raw, self.format(rows.shape[1]), words)


SCHEMES: Mapping[str, UniformScheme] = MappingProxyType(
    {**{name: BlockScheme(name) for name in reference.QUANTIZERS}, **uniform.UNIFORM_SCHEMES}
)
"""Schemes by the name that `scheme_key` returns."""


def scheme_key(name: str, known: Iterable[str]) -> str:
    """Finds the known name that a user means.

    Args:
        name: the name in any case, with or without underscores: ``q4k`` for ``q4_k``.
        known: all names.

    Raises:
        ConfigError: no name matches.
    """
    by_spelling = {key.replace("_", ""): key for key in known}
    key = by_spelling.get(name.lower().replace("_", ""))
    if key is None:
        raise ConfigError(f"quantization scheme {name!r} is unknown; known are {', '.join(by_spelling.values())}")
    return key


def scheme_named(name: str) -> UniformScheme:
    """A scheme of SCHEMES by any spelling of its name.

    Raises:
        ConfigError: no name matches.
    """
    return SCHEMES[scheme_key(name, SCHEMES)]


@dataclass(frozen=True)
class SchemeRules:
    """Users' rules in order; the first match decides.

    Attributes:
        patterns: expressions to search for in Hugging Face names, each with the scheme for a match.
    """

    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()

    @classmethod
    def parse(cls, rules: Mapping[str, str], known: Iterable[str]) -> SchemeRules:
        """Parses regular expressions and users' names of schemes.

        Args:
            rules: the setting ``quantization_rules``.
            known: names of schemes, and other allowed values.

        Raises:
            ConfigError: a scheme is unknown or an expression malformed.
        """
        if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules.values()):
            raise ConfigError("quantization_rules must map regular expressions to scheme names")
        names, patterns = tuple(known), []
        for pattern, name in rules.items():
            try:
                patterns.append((re.compile(pattern), scheme_key(name, names)))
            except re.error as error:
                raise ConfigError(f"quantization_rules: {pattern!r} is not a regular expression: {error}") from None
        return cls(tuple(patterns))

    def find(self, name: str) -> str | None:
        """The scheme for a tensor; None: no rule matches."""
        return next((scheme for pattern, scheme in self.patterns if pattern.search(name)), None)
