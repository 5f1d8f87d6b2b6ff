"""Calibrated scales of the KV cache: constants for each layer, computed once on sample text, instead of one per token.

value = stored * scale + zero. They come from what --quantization-param-path names (vLLM's JSON file, or LMDeploy's
folder of ``layers.*.past_kv_scale.*`` files), else from ``k_scale`` and ``v_scale`` tensors of the checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from llmjax.checkpoint import Checkpoint
from llmjax.checkpoint.files import read_object
from llmjax.errors import CheckpointError, ConfigError
from llmjax.models import ModelConfig
from llmjax.models.layers.state import LatentKV, PagedKV

logger = logging.getLogger(__name__)

# As vLLM and compressed-tensors write them (vLLM: model_loader/weight_utils.py, maybe_remap_kv_scale_name).
TENSOR = re.compile(
    r"(?:model\.|language_model\.)*layers\.(?P<layer>[0-9]{1,9})\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?(?P<part>k|v|kv)_scale|(?P<projection>[kv])_proj\.output_scale)"
)
UNUSED_TENSOR = re.compile(r".*\.self_attn\.(?:attn\.|q_proj\.|qkv_proj\.)?(?:q_scale|prob_scale|q_proj\.output_scale)")
LMDEPLOY_FILE = re.compile(r"layers\.(?P<layer>[0-9]{1,9})\.past_kv_scale\.(?P<rank>[0-9]{1,9})\.weight")
LAYER = re.compile(r"0|[1-9][0-9]{0,8}")
JSON_TYPES = {"float8_e4m3fn": jnp.float8_e4m3fn, "fp8_e4m3": jnp.float8_e4m3fn, "int8": jnp.int8}


@dataclass(frozen=True)
class _Affine:
    """Scale and zero point of one layer's keys or values."""

    scale: float
    zero: float = 0.0

    def check(self, where: str) -> _Affine:
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise CheckpointError(f"{where}: a scale must be a positive number, not {self.scale}")
        if not np.isfinite(self.zero):
            raise CheckpointError(f"{where}: a zero point must be a number, not {self.zero}")
        return self


@dataclass(frozen=True)
class _Layer:
    keys: _Affine
    values: _Affine


def is_kv_scale(name: str) -> bool:
    """Whether a tensor holds scales of the KV cache or of attention, not weights."""
    return bool(TENSOR.fullmatch(name) or UNUSED_TENSOR.fullmatch(name))


def kv_calibration(
    checkpoint: Checkpoint, param_path: str | None, *, dtype: jnp.dtype, model: ModelConfig
) -> npt.NDArray[np.float32] | None:
    """Scales and zero points of every layer, or None where each token is to get a scale of its own.

    Args:
        checkpoint: where ``k_scale`` and ``v_scale`` tensors may be.
        param_path: a JSON file or a folder that replaces them; None: none given.
        dtype: dtype of the KV cache.
        model: the model, whose layers with keys and values have scales.

    Returns:
        f32 [layers, 2 (keys, values), 2 (scale, zero point)]; 1 and 0 of layers that keep no keys and values.

    Raises:
        ConfigError: ``param_path`` is missing or made for another type.
        CheckpointError: a file or tensor is malformed, lacks a layer or has one too many, or the model keeps latent
            vectors; the message names it.
    """
    if param_path is not None:
        path = Path(param_path).expanduser()
        if not path.exists():
            raise ConfigError(f"quantization_param_path: {path} does not exist")
        layers = _read_folder(path, dtype) if path.is_dir() else _read_json(path, dtype, checkpoint.config)
    else:
        path, layers = checkpoint.path, _read_tensors(checkpoint, dtype)
        if not layers:
            return None
    if any(isinstance(state, LatentKV) for state in model.states):
        raise CheckpointError(f"{path}: scales of keys and values are for a cache of both, not of latent vectors")
    kept = {i for i, state in enumerate(model.states) if isinstance(state, PagedKV)}
    if missing := kept - layers.keys():
        raise CheckpointError(f"{path}: there are no KV cache scales of layer {min(missing)}")
    if extra := layers.keys() - kept:
        first = min(extra)
        why = "which keeps no keys and values" if first < model.num_layers else f"the model has {model.num_layers}"
        raise CheckpointError(f"{path}: there are KV cache scales of layer {first}, {why}")
    scales = np.array([[[1, 0]] * 2] * model.num_layers, np.float32)
    for i, layer in layers.items():
        scales[i] = [(part.scale, part.zero) for part in (layer.keys, layer.values)]
    return scales


def _read_json(path: Path, dtype: jnp.dtype, model: Mapping[str, Any]) -> dict[int, _Layer]:
    """vLLM's ``{"model_type": …, "kv_cache": {"dtype": …, "scaling_factor": {rank: {layer: scale}}}}``."""
    root = read_object(path)
    made_for = root.get("model_type")
    if made_for is not None and model.get("model_type") is not None and made_for != model["model_type"]:
        raise CheckpointError(f"{path}: model_type is {made_for!r}, the model's is {model['model_type']!r}")
    if "kv_cache" not in root:
        found = ", ".join(repr(key[:40]) for key in list(root)[:5]) or "nothing"
        raise CheckpointError(
            f"{path}: holds {found} and no 'kv_cache', where vLLM's files have their scales; without "
            "quantization_param_path each token gets a scale of its own"
        )
    cache = _object(root["kv_cache"], f"{path}: kv_cache")
    name = cache.get("dtype")
    if not isinstance(name, str) or name not in JSON_TYPES:
        raise CheckpointError(f"{path}: kv_cache.dtype must be one of {', '.join(JSON_TYPES)}, not {name!r}")
    _check_type(path, jnp.dtype(JSON_TYPES[name]), dtype)
    field = f"{path}: kv_cache.scaling_factor"
    ranks = _object(cache.get("scaling_factor"), field)
    if list(ranks) != ["0"]:
        raise CheckpointError(f"{field} must hold rank 0 alone, not {', '.join(map(repr, ranks)) or 'nothing'}")
    layers = {}
    for key, value in _object(ranks["0"], f"{field}.0").items():
        where = f"{field}.0.{key[:40]}"
        if not LAYER.fullmatch(key):
            raise CheckpointError(f"{where}: the key is not a layer's number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{where} must be a number, not {value!r}")
        with np.errstate(over="ignore"):  # what exceeds f32 becomes inf, and is refused
            scale = _Affine(float(np.float32(min(max(value, -1e39), 1e39)))).check(where)
        layers[int(key)] = _Layer(scale, scale)
    return layers


def _read_folder(path: Path, dtype: jnp.dtype) -> dict[int, _Layer]:
    """LMDeploy's files of f32: key scale and value scale, or key scale, key zero, value scale, value zero."""
    layers = {}
    for file in sorted(path.iterdir()):
        match = LMDEPLOY_FILE.fullmatch(file.name)
        if match is None:
            continue
        if int(match["rank"]) != 0:
            raise CheckpointError(f"{file}: is of rank {match['rank']}; scales made for several devices do not fit one")
        size = file.stat().st_size
        if size not in (8, 16):
            raise CheckpointError(f"{file}: has {size} bytes; two or four f32 are expected")
        numbers = [float(x) for x in np.frombuffer(file.read_bytes(), "<f4")]
        k, v = (
            (_Affine(numbers[0]), _Affine(numbers[1])) if size == 8 else (_Affine(*numbers[:2]), _Affine(*numbers[2:]))
        )
        layers[int(match["layer"])] = _Layer(k.check(str(file)), v.check(str(file)))
    if not layers:
        raise CheckpointError(f"{path}: holds no file layers.N.past_kv_scale.0.weight")
    _check_type(path, jnp.dtype(jnp.int8), dtype)
    return layers


def _read_tensors(checkpoint: Checkpoint, dtype: jnp.dtype) -> dict[int, _Layer]:
    """``k_scale`` and ``v_scale``; nothing if there are none or they are made for another type than the cache's."""
    found: dict[int, dict[str, _Affine]] = {}
    for name, tensor in checkpoint.tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None:
            continue
        where = f"{checkpoint.path}: tensor {name}"
        if tuple(tensor.shape) not in ((), (1,)):
            raise CheckpointError(f"{where} has shape {list(tensor.shape)}; one KV cache scale a layer is supported")
        scale = _Affine(float(tensor.read(np.dtype(np.float32)).reshape(()))).check(where)
        parts = found.setdefault(int(match["layer"]), {})
        for part in match["part"] or match["projection"]:
            if part in parts:
                raise CheckpointError(f"{where}: the layer has another {part}_scale")
            parts[part] = scale
    if not found:
        return {}
    made_for = _scheme_type(checkpoint)
    if made_for != dtype:
        logger.info(
            "%s has KV cache scales for %s, which a cache of %s does not use",
            checkpoint.path,
            made_for.name,
            dtype.name,
        )
        return {}
    for layer, parts in found.items():
        for part in "kv":
            if part not in parts:
                raise CheckpointError(f"{checkpoint.path}: layer {layer} has no {part}_scale, only the other one")
    return {layer: _Layer(parts["k"], parts["v"]) for layer, parts in found.items()}


def _scheme_type(checkpoint: Checkpoint) -> jnp.dtype:
    """The type that a checkpoint's scales are for: what its ``kv_cache_scheme`` says, else E4M3 as in vLLM."""
    from llmjax.checkpoint.formats.registry import CONFIG_KEYS  # few checkpoints have scales

    for key in CONFIG_KEYS:
        settings = checkpoint.config.get(key)
        scheme = settings.get("kv_cache_scheme") if isinstance(settings, dict) else None
        if isinstance(scheme, dict) and scheme.get("type") == "int":
            return jnp.dtype(jnp.int8)
    return jnp.dtype(jnp.float8_e4m3fn)


def _check_type(path: Path, made_for: jnp.dtype, dtype: jnp.dtype) -> None:
    if made_for != dtype:
        raise ConfigError(
            f"quantization_param_path: {path} holds scales for {made_for.name}, the KV cache is {dtype.name}"
        )


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must be an object, not {str(value)[:60]}")
    return value
