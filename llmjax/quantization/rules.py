"""Users' rules for single modules: a regular expression on names, and the scheme that a match becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmjax.errors import ConfigError

Patterns = tuple[tuple[re.Pattern[str], str], ...]


@dataclass(frozen=True)
class Rules:
    """Rules in order; the first that matches decides.

    Attributes:
        patterns: searched for in Hugging Face names, with the scheme of a match.
    """

    patterns: Patterns = ()

    @classmethod
    def parse(cls, rules: Mapping[str, str], scheme: Callable[[str], str]) -> Rules:
        """From regular expressions and what users call schemes.

        Args:
            rules: the setting ``quantization_rules``.
            scheme: the name of a scheme as it is used here; raises ConfigError if there is none.

        Raises:
            ConfigError: a scheme is unknown or an expression malformed.
        """
        if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules.values()):
            raise ConfigError("quantization_rules must map regular expressions to scheme names")
        patterns = []
        for pattern, name in rules.items():
            try:
                patterns.append((re.compile(pattern), scheme(name)))
            except re.error as error:
                raise ConfigError(f"quantization_rules: {pattern!r} is no regular expression: {error}") from None
        return cls(tuple(patterns))

    def find(self, name: str) -> str | None:
        """The scheme for a tensor; None: no rule matches."""
        return next((scheme for pattern, scheme in self.patterns if pattern.search(name)), None)
