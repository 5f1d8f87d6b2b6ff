"""How the next tokens are guessed, so that one step may bring several: the setting ``speculative_config``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmjax.errors import ConfigError

MOST_DRAFTS = 32
NGRAM = ("ngram", "[ngram]")  # names of the method; older versions of vLLM have it as the model
DRAFT_MODEL = "draft_model"
WINDOW = 5  # tokens of an n-gram, where nothing is said
COUNTS = ("num_speculative_tokens", "disable_by_batch_size")
LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")
OF_MODEL = ("revision", "quantization")
KEYS = ("method", "model", *COUNTS, *LOOKUP, *OF_MODEL)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Drafts by prompt lookup: what followed the last tokens where they occurred before (Saxena 2023); or
    drafts of a smaller model (Leviathan et al. 2023).

    Args:
        num_speculative_tokens: drafts of a step at most.
        model: the smaller model, as the setting ``model`` names one; None: prompt lookup.
        revision, quantization: the smaller model's, like the settings of these names.
        prompt_lookup_max: tokens of the longest n-gram that is looked for; longer ones go first.
        prompt_lookup_min: tokens of the shortest n-gram that is looked for.
        disable_by_batch_size: no drafts when more sequences than this run.
    """

    num_speculative_tokens: int
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None
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
        by_model = _by_model(values.get("method"), values.get("model"))
        for key in LOOKUP if by_model else OF_MODEL:
            if values.get(key) is not None:
                raise ConfigError(
                    f"speculative_config: {key} has no meaning {'with' if by_model else 'without'} a model"
                )
        if values.get("num_speculative_tokens") is None:
            raise ConfigError("speculative_config needs num_speculative_tokens")
        texts = {key: values[key] for key in ("model", *OF_MODEL) if by_model and values.get(key) is not None}
        for key, text in texts.items():
            if not isinstance(text, str) or not text:
                raise ConfigError(f"speculative_config: {key} must be a text, not {text!r}")
        counts = {key: values[key] for key in (*COUNTS, *LOOKUP) if values.get(key) is not None}
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
        return cls(**texts, **(counts | {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}))


def draft_lengths(most: int) -> tuple[int, ...]:
    """Numbers of drafts that a row of a step may have, largest first: ``most``, a half of it and a quarter."""
    return tuple(dict.fromkeys(length for length in (most, most // 2, most // 4) if length))


def _by_model(method: object, model: object) -> bool:
    """Whether a model makes the guesses, and not prompt lookup; raises ConfigError if it is neither."""
    if method is None and model is None:
        raise ConfigError('speculative_config needs a method, which may be "ngram", or the model that makes drafts')
    if method not in (None, DRAFT_MODEL, *NGRAM):
        raise ConfigError(
            f"speculative_config does not know the method {method!r}; it may be ngram, or {DRAFT_MODEL} with a model"
        )
    if method == DRAFT_MODEL and (model is None or model in NGRAM):
        raise ConfigError(f"speculative_config: the method {DRAFT_MODEL} needs a model")
    if method in NGRAM and model not in (None, *NGRAM):
        raise ConfigError(f"speculative_config: the method ngram has no model, but {model!r} is given")
    return method == DRAFT_MODEL or (method is None and model not in NGRAM)
