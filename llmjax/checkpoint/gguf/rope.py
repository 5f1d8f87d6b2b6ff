"""Rotary embedding settings of a GGUF file as ``rope_theta`` and ``rope_scaling`` of config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.keys import ArchitectureKeys
from llmjax.errors import CheckpointError

DIVISORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({DIVISORS, LONG, SHORT})
"""Tensors that hold frequencies and no weights."""


def rope_config(gguf: GGUFFile, keys: ArchitectureKeys, *, head_dim: int, context: int) -> dict[str, Any]:
    """Keys of config.json about rotary embedding.

    Args:
        gguf: the file.
        keys: its architecture's keys.
        head_dim: elements of a head.
        context: the model's context length in tokens.

    Raises:
        CheckpointError: a key or tensor makes no sense, or scalings contradict each other.
    """
    width = keys.integer("rope.dimension_count", head_dim)
    if width % 2 or width > head_dim:
        keys.fail("rope.dimension_count", f"is {width}, not an even number up to the head's {head_dim}")
    keys.only("rope.dimension_count_swa", width)
    found: dict[str, Any] = {
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(gguf, keys, width // 2, context),
    }
    if width != head_dim:
        found |= {"partial_rotary_factor": width / head_dim, "rope_dimension_count": width}
    return found


def _scaling(gguf: GGUFFile, keys: ArchitectureKeys, frequencies: int, context: int) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    original = keys.integer("rope.scaling.original_context_length", context)
    if kind != "yarn":
        for key in ("ext_factor", "attn_factor", "beta_fast", "beta_slow"):
            keys.value(f"rope.scaling.yarn_{key}", 0)  # written by some converters, read by yarn alone

    if kind == "longrope" or LONG in gguf.tensors or SHORT in gguf.tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(gguf, LONG, frequencies),
            "short_factor": _factors(gguf, SHORT, frequencies),
            "original_max_position_embeddings": original,
            "attention_factor": attention,
        }
    if attention != 1.0 and kind != "yarn":
        keys.fail("rope.scaling.attn_factor", f"is {attention}, which scaling {kind!r} has no use for")
    if DIVISORS in gguf.tensors:
        divisors = _factors(gguf, DIVISORS, frequencies)
        if kind == "yarn":
            keys.fail("rope.scaling.type", f"is 'yarn', but tensor {DIVISORS!r} scales frequencies already")
        linear = factor if kind == "linear" else 1.0
        return {"rope_type": "custom", "inv_freq_divisors": [divisor * linear for divisor in divisors]}
    if kind == "yarn":
        return _yarn(keys, factor=factor, attention=attention, original=original)
    if kind == "linear":
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind != "none":
        keys.fail("rope.scaling.type", f"is {kind!r}; supported are none, linear, yarn, longrope")
    return None


def _yarn(keys: ArchitectureKeys, *, factor: float, attention: float, original: int) -> dict[str, Any]:
    keys.only("rope.scaling.yarn_ext_factor", 1.0)
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    # Converters write config.json's attention_factor, which replaces yarn's own; 1 is what they write for none.
    given = keys.number("rope.scaling.yarn_attn_factor", 1.0)
    own = 1.0 + 0.1 * math.log(max(factor, 1.0)) if given == 1.0 else given
    if given != 1.0 or attention != 1.0:  # the other one is on top of either
        scaling["attention_factor"] = attention * own
    return scaling


def _factors(gguf: GGUFFile, name: str, count: int) -> list[float]:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{gguf.path}: tensor {name!r} is missing, but the rotary scaling is longrope")
    if tensor.shape != (count,):
        raise CheckpointError(f"{gguf.path}: tensor {name!r} has shape {list(tensor.shape)}, not [{count}]")
    values = tensor.read(np.dtype(np.float32))
    if not np.all(np.isfinite(values) & (values > 0)):
        raise CheckpointError(f"{gguf.path}: tensor {name!r} holds a value that is not finite and above 0")
    return [float(value) for value in values]
