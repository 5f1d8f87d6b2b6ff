"""Rope scaling rules: from the rope keys of config.json to final inverse frequencies.

Formulas are those of Hugging Face's ``modeling_rope_utils`` and of the papers: position interpolation (arXiv
2306.15595, linear), NTK-aware scaling (dynamic), YaRN (2309.00071), LongRoPE (2402.13753) and Llama 3.1's blend.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmjax.models.errors import UnsupportedModel
from llmjax.models.fields import Fields
from llmjax.models.layers.rope import RopeConfig
from llmjax.models.layers.rope_lengths import LongFrequencies, StretchedBase

logger = logging.getLogger(__name__)

SECTION_KEYS = ("mrope_section", "mrope_interleaved")  # which frequencies turn by which axis of positions
SECTIONED = ("default", "yarn")  # rules that go with them
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_HEAD_DIM = 1 << 16  # far above any model, so that a wrong number does not make billions of frequencies


@dataclass(frozen=True)
class RopeLengths:
    """The lengths that scaling rules use, in tokens."""

    max_position: int  # max_position_embeddings
    max_model_len: int | None = None  # longest sequence that will be served; None: max_position

    @property
    def served(self) -> int:
        return self.max_model_len or self.max_position


@dataclass(frozen=True)
class _Scaled:
    inv_freq: np.ndarray  # f64 [rotary_dim / 2]
    attention_factor: float = 1.0
    by_length: LongFrequencies | StretchedBase | None = None


@dataclass(frozen=True)
class _Rule:
    scale: Callable[[Fields, int, RopeLengths], _Scaled]
    keys: tuple[str, ...] = ()


def rope_parameters(fields: Fields, layer_type: str, *, theta: str = "rope_theta", scaled: bool = True) -> Fields:
    """The rope keys of one layer type, in either style of config.json.

    Transformers 5 writes ``rope_parameters``, flat or nested by layer type; before, there were ``rope_theta`` and
    ``rope_scaling``. Where both are present they must agree.

    Args:
        theta: the top-level key that holds the base when ``rope_parameters`` does not.
        scaled: whether a scaling that is not nested by layer type applies to this one.

    Raises:
        UnsupportedModel: the two styles contradict each other, or the layer type is missing.
    """
    new, old = dict(fields.mapping("rope_parameters")), dict(fields.mapping("rope_scaling"))
    nested = any(key in LAYER_TYPES for key in new)
    for parameters in (new, old):
        if "type" in parameters:
            parameters.setdefault("rope_type", parameters["type"])
    if nested:
        if old:
            raise fields.error("rope_scaling", "stands beside a rope_parameters nested by layer type; remove one")
        inner = Fields(new, name=f"{fields.name}: rope_parameters").mapping(layer_type)
        if not inner:
            raise fields.error("rope_parameters", f"has no entry for {layer_type}")
        merged, name = dict(inner), f"{fields.name}: rope_parameters.{layer_type}"
    elif not scaled:
        if new:
            raise fields.error("rope_parameters", "must be nested by layer type in this model")
        merged, name = {}, fields.name
    else:
        # A rope_scaling beside rope_parameters without scaling came from the user, and wins.
        if new.get("rope_type") == "default" and old:
            del new["rope_type"]
        for key in new.keys() & old.keys() - {"type"}:
            if new[key] != old[key]:
                raise fields.error("rope_scaling", f"contradicts rope_parameters in {key}")
        merged, name = old | new, f"{fields.name}: {'rope_scaling' if old else 'rope_parameters'}"
        if fields.get("original_max_position_embeddings") is not None:
            merged["original_max_position_embeddings"] = fields.get("original_max_position_embeddings")
    defaults: dict[str, Any] = {
        "rope_theta": fields.get(theta),
        "rope_type": merged.get("type", "default"),
        "partial_rotary_factor": fields.get("partial_rotary_factor") or 1.0,
        "rope_dimension_count": fields.get("rope_dimension_count"),
    }
    return Fields({key: value for key, value in merged.items() if value is not None}, defaults, name)


def of_whole_heads(parameters: Fields) -> Fields:
    """The rope keys of a family that always rotates whole heads.

    Its classes in transformers ignore ``partial_rotary_factor``, or fail on it if there is a scaling. A GGUF file's
    rope.dimension_count still counts.

    Raises:
        UnsupportedModel: there are both the factor and a scaling.
    """
    if parameters.number("partial_rotary_factor") == 1 or parameters.get("rope_dimension_count") is not None:
        return parameters
    if parameters.get("rope_type") != "default":
        raise parameters.error("partial_rotary_factor", "is not supported: this family rotates whole heads")
    logger.warning(
        "%s: partial_rotary_factor = %s has no effect: as in transformers, this family rotates whole heads",
        parameters.name,
        parameters.get("partial_rotary_factor"),
    )
    values = {key: value for key, value in parameters.values.items() if key != "partial_rotary_factor"}
    return replace(parameters, values=values, defaults={**parameters.defaults, "partial_rotary_factor": 1.0})


def resolve_rope(parameters: Fields, *, head_dim: int, lengths: RopeLengths) -> RopeConfig:
    """Applies a scaling rule.

    Args:
        parameters: the result of ``rope_parameters``.
        head_dim: size of a head; ``partial_rotary_factor`` is the part of it that is rotated.

    Raises:
        UnsupportedModel: an unknown rope_type, a key the rule does not know, or a value out of range.
    """
    rope_type = parameters.choice("rope_type", _RULES)
    rule = _RULES[rope_type]
    common = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    # "finetuned" is only a remark in older YaRN checkpoints.
    parameters.only((*common, "finetuned", *rule.keys, *(SECTION_KEYS if rope_type in SECTIONED else ())))
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedModel(f"{parameters.name}: heads of {head_dim} entries are more than {MAX_HEAD_DIM}")
    # The margin keeps a quotient such as 18 / 80 from losing an entry to rounding.
    rotary_dim = int(head_dim * min(parameters.number("partial_rotary_factor"), 2) + 1e-6)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise parameters.error(
            "partial_rotary_factor", f"leaves {rotary_dim} of {head_dim} entries of a head to rotate"
        )
    scaled = rule.scale(parameters, rotary_dim, lengths)
    every = [*scaled.inv_freq, *(scaled.by_length.inv_freq if isinstance(scaled.by_length, LongFrequencies) else ())]
    if not 0 < min(every) <= max(every) < np.finfo(np.float32).max:
        raise parameters.error("rope_theta", "and the scaling give frequencies that f32 cannot hold")
    return RopeConfig(
        inv_freq=tuple(scaled.inv_freq.astype(np.float32).tolist()),
        attention_factor=scaled.attention_factor,
        by_length=scaled.by_length,
        axes=_axes(parameters, rotary_dim // 2),
        max_position=extended_length(parameters, lengths),
    )


def _axes(parameters: Fields, count: int) -> tuple[int, ...] | None:
    """The axis of positions (time, row, column) that each frequency turns by; None: positions have one axis.

    Qwen2-VL (arXiv:2409.12191) gives the first frequencies to time, the next to rows, the last to columns. With
    ``mrope_interleaved`` (Qwen3-VL) they take turns, and what is left over is of time.
    """
    sections = parameters.get("mrope_section")
    if sections is None:
        return None
    if not isinstance(sections, list | tuple) or len(sections) != 3 or not all(isinstance(n, int) for n in sections):
        raise parameters.error("mrope_section", "must be three integers")
    if parameters.get("mrope_interleaved"):
        ends = [0, *(3 * n for n in sections[1:])]
        return tuple(i % 3 if i < ends[i % 3] else 0 for i in range(count))
    if sum(sections) != count:
        raise parameters.error("mrope_section", f"divides {sum(sections)} frequencies; a head has {count}")
    return tuple(axis for axis, n in enumerate(sections) for _ in range(n))


def extended_length(parameters: Fields, lengths: RopeLengths) -> int:
    """The longest sequence that the model supports, in tokens; a rule may go past max_position_embeddings."""
    rope_type = parameters.get("rope_type")
    if rope_type == "yarn" and parameters.get("factor") is not None:
        return max(lengths.max_position, int(_original_length(parameters, lengths) * parameters.number("factor")))
    if rope_type == "dynamic":
        return max(lengths.max_position, lengths.served)
    return lengths.max_position


def _base(parameters: Fields, dim: int) -> np.ndarray:
    return parameters.number("rope_theta") ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _original_length(parameters: Fields, lengths: RopeLengths) -> int:
    return parameters.optional_integer("original_max_position_embeddings") or lengths.max_position


def _default(parameters: Fields, dim: int, lengths: RopeLengths) -> _Scaled:
    return _Scaled(_base(parameters, dim))


def _linear(parameters: Fields, dim: int, lengths: RopeLengths) -> _Scaled:
    return _Scaled(_base(parameters, dim) / parameters.number("factor"))


def _dynamic(parameters: Fields, dim: int, lengths: RopeLengths) -> _Scaled:
    if dim == 2:
        raise parameters.error("rope_type", "needs more than two rotary entries a head")
    return _Scaled(_base(parameters, dim), by_length=StretchedBase(lengths.max_position, parameters.number("factor")))


def _ntk_alpha(parameters: Fields, dim: int, lengths: RopeLengths) -> _Scaled:
    # Hunyuan's rule: the base times a power of alpha, at all lengths. Its files also have yarn's keys.
    if dim == 2:
        raise parameters.error("rope_type", "needs more than two rotary entries a head")
    stretch = parameters.number("alpha") ** (dim / (dim - 2))
    return _Scaled(_base(parameters, dim) * stretch ** (-np.arange(0, dim, 2, dtype=np.float64) / dim))


def _ntk(parameters: Fields, dim: int, lengths: RopeLengths) -> _Scaled:
    # gte's rule (https://kexue.fm/archives/9706): fixed, or mixed with an exponent b, at all lengths.
    factor, exponent = parameters.number("factor"), parameters.optional_number("mixed_b")
    inv = _base(parameters, dim)
    if exponent is None:
        return _Scaled(inv * factor ** (-(np.arange(0, dim, 2, dtype=np.float64) + 2) / dim))
    return _Scaled(inv * factor ** -((np.arange(1, dim // 2 + 1) / (dim / 2)) ** exponent))


def _llama3(parameters: Fields, dim: int, lengths: RopeLengths) -> _Scaled:
    inv = _base(parameters, dim)
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if low > high:
        raise parameters.error("high_freq_factor", f"must be at least low_freq_factor = {low}")
    turns = _original_length(parameters, lengths) * inv / (2 * math.pi)  # over the original context
    # 0: interpolate fully, 1: leave alone; Llama 4 Scout has nothing in between.
    smooth = np.clip((turns - low) / (high - low), 0, 1) if low < high else (turns >= low).astype(inv.dtype)
    return _Scaled((1 - smooth) * inv / parameters.number("factor") + smooth * inv)


def _yarn(parameters: Fields, dim: int, lengths: RopeLengths) -> _Scaled:
    original = _original_length(parameters, lengths)
    factor = parameters.optional_number("factor") or lengths.max_position / original
    log_theta = math.log(parameters.number("rope_theta"))
    if log_theta <= 0:
        raise parameters.error("rope_theta", "must exceed 1 for yarn")

    def index_of(turns: float) -> float:  # index of the frequency with this many turns
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * log_theta)

    low = index_of(parameters.optional_number("beta_fast") or 32.0)
    high = index_of(parameters.optional_number("beta_slow") or 1.0)
    if parameters.get("truncate") is None or parameters.flag("truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    inv = _base(parameters, dim)
    return _Scaled(inv / factor * ramp + inv * (1 - ramp), _yarn_attention_factor(parameters, factor))


def yarn_gain(factor: float, mscale: float) -> float:
    """YaRN's factor of queries and keys if it stretches positions by ``factor``."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn_attention_factor(parameters: Fields, factor: float) -> float:
    given, times = parameters.optional_number("attention_factor"), parameters.optional_number("attn_factor")
    if given is not None:
        if times is not None:
            raise parameters.error("attn_factor", "is given beside attention_factor")
        return given
    if times is not None:  # in DeepSeek-R1-0528-Qwen3-8B; vLLM reads this key, Hugging Face's class does not
        return times * yarn_gain(factor, 1.0)
    # Zero means "not given" to Hugging Face.
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return yarn_gain(factor, parameters.number("mscale")) / yarn_gain(factor, parameters.number("mscale_all_dim"))
    return yarn_gain(factor, 1.0)


def _longrope(parameters: Fields, dim: int, lengths: RopeLengths) -> _Scaled:
    original = _original_length(parameters, lengths)
    short, long = (
        _base(parameters, dim) / np.array(parameters.numbers(f"{name}_factor", count=dim // 2))
        for name in ("short", "long")
    )
    with np.errstate(over="ignore"):  # `resolve_rope` refuses what f32 cannot hold
        beyond = LongFrequencies(original, tuple(long.astype(np.float32).tolist()))
    factor = parameters.optional_number("factor") or lengths.max_position / original
    attention_factor = parameters.optional_number("attention_factor")
    if attention_factor is None:
        if original < 2:
            raise parameters.error("original_max_position_embeddings", "must be at least 2 for longrope")
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _Scaled(short, attention_factor, beyond)


def _custom(parameters: Fields, dim: int, lengths: RopeLengths) -> _Scaled:
    # GGUF files store the result of llama3 scaling, as divisors.
    divisors = parameters.numbers("inv_freq_divisors", count=dim // 2)
    attention_factor = parameters.optional_number("attention_factor")
    return _Scaled(_base(parameters, dim) / np.array(divisors), 1.0 if attention_factor is None else attention_factor)


_YARN_KEYS = (
    *("factor", "attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
)
_LONGROPE = _Rule(_longrope, ("factor", "attention_factor", "long_factor", "short_factor"))
_RULES = {
    "default": _Rule(_default),
    "linear": _Rule(_linear, ("factor",)),
    "dynamic": _Rule(_dynamic, ("factor",)),
    "ntk_alpha": _Rule(_ntk_alpha, ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
    "ntk": _Rule(_ntk, ("factor", "mixed_b")),
    "llama3": _Rule(_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": _Rule(_yarn, _YARN_KEYS),
    "longrope": _LONGROPE,
    "su": _LONGROPE,  # its older name
    "custom": _Rule(_custom, ("inv_freq_divisors", "attention_factor")),
}
