"""How the next tokens are guessed, so that one step may bring several: the setting ``speculative_config``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmjax.errors import ConfigError

MOST_DRAFTS = 32
NAMES = ("ngram", "[ngram]")  # of the method; older versions of vLLM have it as the model
WINDOW = 5  # tokens of an n-gram, where nothing is said
KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Guesses by prompt lookup: what stood behind the last tokens when they stood in the text before (Saxena 2023).

    Args:
        num_speculative_tokens: drafts of a step at most.
        prompt_lookup_max: tokens of the longest n-gram that is looked for; longer ones go first.
        prompt_lookup_min: of the shortest.
        disable_by_batch_size: with more running sequences than this there are no drafts.
    """

    num_speculative_tokens: int
    prompt_lookup_max: int = WINDOW
    prompt_lookup_min: int = WINDOW
    disable_by_batch_size: int = 4

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """From a mapping in vLLM's form.

        Raises:
            ConfigError: a key is not known, or its value is not one that it may have.
        """
        for key in values:
            if key not in KEYS:
                close = difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.5)
                hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(KEYS)}"
                raise ConfigError(f"speculative_config: unknown key {key!r}{hint}")
        method = values.get("method", values.get("model"))
        if method not in NAMES or values.get("model", method) not in NAMES:
            wrong = method if method not in NAMES else values["model"]
            given = "needs a method" if wrong is None else f"does not know the method or model {wrong!r}"
            raise ConfigError(f"speculative_config {given}; ngram, without a model, is the only one so far")
        if values.get("num_speculative_tokens") is None:
            raise ConfigError("speculative_config needs num_speculative_tokens")
        counts = {key: values[key] for key in KEYS[2:] if values.get(key) is not None}
        for key, value in counts.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"speculative_config: {key} must be an integer of at least 1, not {value!r}")
        # As in vLLM, one bound stands for both.
        longest = counts.get("prompt_lookup_max", counts.get("prompt_lookup_min", WINDOW))
        shortest = counts.get("prompt_lookup_min", longest)
        if shortest > longest:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min ({shortest}) must not exceed prompt_lookup_max ({longest})"
            )
        if counts["num_speculative_tokens"] > MOST_DRAFTS:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens must be at most {MOST_DRAFTS}, not "
                f"{counts['num_speculative_tokens']}"
            )
        return cls(**(counts | {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}))
