"""Keys of config.json that a user replaces: none is lost without a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmjax import models
from llmjax.errors import CheckpointError
from llmjax.models.registry import Conversion

ROPE = "rope_parameters"
# What decides on more than ``ModelConfig``, or is looked at only for one value.
READ_ELSEWHERE = frozenset(
    {
        *("architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "compression_config"),
        *("is_causal", "enable_moe_block", "matryoshka_dimensions", "sentence_transformers"),
        *("classifier_from_token", "is_original_qwen3_reranker"),
    }
)


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with some keys replaced. Where ``rope_parameters`` holds one of them, which would hide it, it is
    replaced there too."""
    rope = config.get(ROPE)
    if not isinstance(rope, Mapping) or ROPE in overrides:
        return {**config, **overrides}
    inner = {key: value for key, value in overrides.items() if key in rope}
    return {**config, **overrides, ROPE: {**rope, **inner}}


def check_reached(
    config: Mapping[str, Any], overrides: Mapping[str, Any], path: Path, *, convert: Conversion | None
) -> None:
    """Makes sure that the model's family reads each key that has been replaced.

    Args:
        config: with them.
        convert: as of ``llmjax.models.model_config``.

    Raises:
        CheckpointError: it does not look at one.
    """
    try:
        as_it_is = models.model_config(config, convert=convert)
    except models.UnsupportedModel:
        return  # whoever needs it says why
    for key in overrides.keys() - READ_ELSEWHERE:
        try:
            reached = models.model_config(overridden(config, {key: _Probe()}), convert=convert) != as_it_is
        except Exception:  # of whatever kind: it has been looked at
            reached = True
        if not reached:
            held = config.get(ROPE)
            nested = isinstance(held, Mapping) and any(
                isinstance(kind, Mapping) and key in kind for kind in held.values()
            )
            hint = f": {ROPE} holds it by kind of layer; replace that" if nested else ""
            raise CheckpointError(f"{path}: hf_overrides: nothing of this model reads {key!r}{hint}")


class _Probe:
    """A value that cannot be used without an error."""

    def __bool__(self) -> bool:
        raise TypeError

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError
