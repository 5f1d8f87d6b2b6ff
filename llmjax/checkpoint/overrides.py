"""Keys of config.json that a user replaces, with a check that each has an effect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmjax import models
from llmjax.errors import CheckpointError
from llmjax.models.registry import Conversion

ROPE = "rope_parameters"
# Keys that are read outside of ``ModelConfig``, or of which only one value matters.
READ_ELSEWHERE = frozenset(
    {
        *("architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "compression_config"),
        *("is_causal", "enable_moe_block", "matryoshka_dimensions", "sentence_transformers"),
        *("classifier_from_token", "is_original_qwen3_reranker"),
    }
)


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with some keys replaced, also within ``rope_parameters``, which would hide them."""
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
        config: config.json with the replaced keys.
        convert: see ``llmjax.models.model_config``.

    Raises:
        CheckpointError: the family does not read one of them.
    """
    try:
        as_it_is = models.model_config(config, convert=convert)
    except models.UnsupportedModel:
        return  # the caller that needs the model reports why
    for key in overrides.keys() - READ_ELSEWHERE:
        try:
            reached = models.model_config(overridden(config, {key: _Probe()}), convert=convert) != as_it_is
        except Exception:  # any error shows that the key was read
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
