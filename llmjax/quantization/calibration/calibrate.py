"""A model calibrated layer by layer: what a layer is given is what the quantized layers before it make.

In memory are one layer and the residual stream of all sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.errors import CheckpointError, ConfigError
from llmjax.models.config import ModelConfig
from llmjax.platforms import Platform
from llmjax.quantization.calibration.layer import CalibratedLayer, alone, check_kinds
from llmjax.quantization.calibration.methods import Calibration
from llmjax.quantization.rounding import FloatRows, Result, round_to_nearest
from llmjax.quantization.save_plan import SavePlan
from llmjax.quantization.settings import CalibrationSettings
from llmjax.weights.uniform import IntegerScheme

EMBEDDING = "model.embed_tokens.weight"


def calibrate(
    plan: SavePlan, sequences: Sequence[Sequence[int]], settings: CalibrationSettings, platform: Platform
) -> Iterator[Result]:
    """Quantizes every layer of the plan; other matrices, and those that do not become integers, are rounded.

    Args:
        plan: of a model of a supported family.
        sequences: token ids, all of one length.
        settings: the method.
        platform: device and types that the model runs in.

    Yields:
        As `Calibration.results`, then the rest.

    Raises:
        ConfigError: nothing of the plan can be calibrated.
        CheckpointError: the model or a kind of layer is not supported, a tensor is missing or a weight is not a number.
    """
    if not any(isinstance(scheme, IntegerScheme) for scheme in plan.layers.values()):
        raise ConfigError(f"--method {settings.method} is for integers; {_names(plan)} can only be rounded")
    config = plan.checkpoint.model_config()
    check_kinds(config, plan.checkpoint.path)
    done = set()
    hidden = _embedded(plan, config, sequences, platform)
    contexts = {
        spec: jax.device_put(alone(spec, len(sequences[0])), platform.device) for spec in dict.fromkeys(config.layers)
    }
    for index in range(config.num_layers):
        layer = CalibratedLayer(plan.checkpoint, config, index, platform)
        context = contexts[config.layers[index]]
        for half in layer.halves:
            calibration = Calibration(plan, settings, layer, half, hidden, context)
            try:
                for result in calibration.results():
                    done.add(result.name)
                    yield result
            except CheckpointError as error:
                raise CheckpointError(f"{plan.checkpoint.path}: layer {index}: {error}") from None
            hidden = layer.outputs(half, hidden, context)
    yield from round_to_nearest(
        plan.tensors, {name: scheme for name, scheme in plan.layers.items() if name not in done}
    )


def _names(plan: SavePlan) -> str:
    return ", ".join(sorted({scheme.name for scheme in plan.layers.values()}))


def _embedded(
    plan: SavePlan, config: ModelConfig, sequences: Sequence[Sequence[int]], platform: Platform
) -> list[jax.Array]:
    """The residual stream before the first layer, [T, D] of each sequence, on the device."""
    tensor = plan.checkpoint.tensors.get(EMBEDDING)
    if tensor is None:
        raise CheckpointError(f"{plan.checkpoint.path}: tensor {EMBEDDING!r} is missing")
    used, places = np.unique(np.array(sequences), return_inverse=True)
    rows = _rows(FloatRows(tensor), used, tensor.shape)
    dtype = platform.activation_dtype
    scale = jnp.asarray(config.embedding_scale, dtype)
    table = jax.device_put(rows.astype(platform.dtype), platform.device).astype(dtype) * scale
    return [table[row] for row in places.reshape(len(sequences), -1)]


def _rows(source: FloatRows, used: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Some rows, f32, read in blocks of the whole."""
    out = np.empty((len(used), shape[1]), np.float32)
    step = source.row_step * max(1, (1 << 22) // (source.row_step * shape[1]))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        first, last = np.searchsorted(used, (start, stop))
        if first < last:
            out[first:last] = source.read(start, stop)[used[first:last] - start]
    return out
