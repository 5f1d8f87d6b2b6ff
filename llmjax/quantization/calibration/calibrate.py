"""Calibrates a model layer by layer with GPTQ or AWQ: the input of a layer is the output of the quantized layers before
it.

One layer and the residual stream of all sequences are in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from llmjax.checkpoint.formats.quantized import SavedScheme
from llmjax.errors import CheckpointError, ConfigError
from llmjax.models.config import ModelConfig
from llmjax.models.decoder import Decoder
from llmjax.models.layers.attention import Attention
from llmjax.platforms import Platform
from llmjax.quantization.calibration.awq import RoundedMatrix, clipped, search_scales
from llmjax.quantization.calibration.experts import Expert, reached
from llmjax.quantization.calibration.gptq import InverseHessian, gptq
from llmjax.quantization.calibration.layer import (
    F32,
    Around,
    CalibratedLayer,
    InputStatistics,
    Stage,
    Sublayer,
    alone,
    check_kinds,
    chosen_keys,
    dispatched,
    shapes_of,
)
from llmjax.quantization.plan import SavePlan
from llmjax.quantization.report import Difference
from llmjax.quantization.rounding import FloatRows, Result, round_to_nearest
from llmjax.quantization.settings import CalibrationSettings
from llmjax.weights.uniform import IntegerScheme

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
NEVER_CLIPPED = (
    "q_proj",
    "k_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "indexer.wq_b",
    "indexer.wk",
)  # errors of queries and keys multiply (AutoAWQ)


@dataclass(frozen=True, eq=False)
class Calibrated(Result):
    """A quantized projection.

    Attributes:
        nearest: error of its outputs if it had been rounded to nearest.
        outputs: error of its outputs.
    """

    nearest: Difference = field(default_factory=Difference)
    outputs: Difference = field(default_factory=Difference)


@dataclass(frozen=True, eq=False)
class Fold:
    """Scales that have moved from the source of an input into the projections that read it.

    Attributes:
        columns: f32 [in], factors of the projections' columns.
        rows: f32 [out of the source], divisors of the source's rows if the source is a projection.
    """

    columns: np.ndarray
    rows: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Calibration:
    """The calibration of a sublayer or of one of its experts, with everything that it depends on.

    Attributes:
        inputs: computes the inputs of a stage's projections, with the current weights of `layer`.
    """

    plan: SavePlan
    settings: CalibrationSettings
    layer: CalibratedLayer | Expert
    sublayer: Sublayer
    inputs: Callable[[Stage], InputStatistics]

    def results(self) -> Iterator[Result]:
        """Quantizes the sublayer's projections; the layer continues with the quantized weights.

        Yields:
            A `Calibrated` for each projection, and norms and biases that have changed.
        """
        return self._gptq() if self.settings.method == "gptq" else self._awq()

    def _scheme(self, module: str) -> IntegerScheme | None:
        """The scheme of a projection, if it can be calibrated."""
        scheme = self.plan.layers.get(self.layer.name(f"{module}.weight"))
        return scheme if isinstance(scheme, IntegerScheme) else None

    def _modules(self, stage: Stage) -> Mapping[str, IntegerScheme]:
        return {module: scheme for module in stage.modules if (scheme := self._scheme(module)) is not None}

    def _gptq(self) -> Iterator[Result]:
        for stage in self.sublayer.stages:
            modules = self._modules(stage)
            if not modules:
                continue
            inputs = self.inputs(stage)
            inverse = InverseHessian.of(inputs.gram, damping=self.settings.damping, act_order=self.settings.act_order)
            for module, scheme in modules.items():
                weights = self.layer.values[f"{module}.weight"]
                rows = gptq(weights, inverse, scheme, static_groups=self.settings.static_groups)
                found = np.empty(weights.shape, np.float32)
                rows.dequantize(found)
                nearest = RoundedMatrix(weights, scheme).rounded(weights)
                total = inputs.energy(weights)
                self.layer.put(f"{module}.weight", found)
                yield Calibrated(
                    self.layer.name(f"{module}.weight"),
                    rows,
                    Difference.between(found, weights),
                    nearest=Difference(inputs.energy(nearest - weights), total),
                    outputs=Difference(inputs.energy(found - weights), total),
                )

    def _awq(self) -> Iterator[Result]:
        original = {m: self.layer.values[f"{m}.weight"] for stage in self.sublayer.stages for m in self._modules(stage)}
        before = {stage: self.inputs(stage) for stage in self.sublayer.stages}
        rows: dict[str, np.ndarray] = {}  # divisors of the rows of a projection
        columns: dict[Stage, np.ndarray] = {}
        for stage, inputs in before.items():
            projections = [RoundedMatrix(self.layer.values[f"{m}.weight"], s) for m, s in self._modules(stage).items()]
            fold = yield from self._fold(stage, projections, inputs)
            if fold.rows is not None:
                assert stage.source is not None
                rows[stage.source] = fold.rows
            columns[stage] = fold.columns
            for module in stage.modules:
                self.layer.put(f"{module}.weight", self.layer.values[f"{module}.weight"] * fold.columns)
        for stage, inputs in before.items():
            divided = inputs.divided(columns[stage])
            for module, scheme in self._modules(stage).items():
                weights = self.layer.values[f"{module}.weight"]
                each = RoundedMatrix(weights, scheme)
                clip = self.settings.clip and not module.endswith(NEVER_CLIPPED)
                quantized = scheme.quantize(clipped(each, divided) if clip else weights)
                found = np.empty(weights.shape, np.float32)
                quantized.dequantize(found)
                self.layer.put(f"{module}.weight", found)
                unfolded = found / columns[stage]
                if module in rows:
                    unfolded *= rows[module][:, None]
                old = original[module]
                total = inputs.energy(old)
                yield Calibrated(
                    self.layer.name(f"{module}.weight"),
                    quantized,
                    Difference.between(found, weights),
                    nearest=Difference(inputs.energy(RoundedMatrix(old, scheme).rounded(old) - old), total),
                    outputs=Difference(inputs.energy(unfolded - old), total),
                )

    def _fold(
        self, stage: Stage, projections: list[RoundedMatrix], inputs: InputStatistics
    ) -> Generator[Result, None, Fold]:
        """Divides the channels of the stage's input by scales, in the source of the input; by 1 if that cannot be done.

        Yields:
            The tensors that are not quantized and have changed.
        """
        if len(projections) == len(stage.modules):  # a projection that stays as it is cannot be scaled
            if stage.source is not None and stage.source.endswith("norm"):
                return (yield from self._fold_norm(stage.source, search_scales(projections, inputs)))
            if stage.source is not None and self._scheme(stage.source) is not None:
                return (yield from self._fold_projection(stage.source, projections, inputs))
        return Fold(np.ones(len(inputs.magnitude), np.float32))

    def _fold_norm(self, norm: str, scales: np.ndarray) -> Generator[Result, None, Fold]:
        name = f"{norm}.weight"
        one = np.float32(self.layer.spec.norm.plus_one)
        stored = self.layer.values[name]
        dtype = self.plan.plain_dtype(self.layer.name(name))
        new = ((one + stored) / scales - one).astype(dtype).astype(np.float32)
        # Rounding to the stored type does no harm: columns are multiplied by the scales that the norm has after it.
        usable = (one + stored != 0) & (one + new != 0) & np.isfinite(new)
        new = np.where(usable, new, stored)
        scales = np.divide(one + stored, one + new, out=np.ones_like(new), where=usable)
        self.layer.put(name, new)
        yield Result(self.layer.name(name), new, None)
        if f"{norm}.bias" in self.layer.values:
            yield self._divided(f"{norm}.bias", scales)
        return Fold(scales)

    def _fold_projection(
        self, module: str, projections: list[RoundedMatrix], inputs: InputStatistics
    ) -> Generator[Result, None, Fold]:
        """Folds scales into the rows of a projection that is quantized later; heads that share values share scales."""
        weights = self.layer.values[f"{module}.weight"]
        shared = len(inputs.magnitude) // len(weights)
        attention, size = self.layer.spec.mixer, 1
        if shared > 1:
            assert isinstance(attention, Attention)
            size = attention.head_dim
        by_head = inputs.magnitude.reshape(-1, shared, size)
        magnitude = by_head.mean(axis=1, keepdims=True).repeat(shared, axis=1).reshape(-1)
        scales = search_scales(projections, inputs, magnitude=magnitude)
        rows = scales.reshape(-1, shared, size)[:, 0].reshape(-1)
        self.layer.put(f"{module}.weight", weights / rows[:, None])
        bias = f"{module}.bias"
        if bias in self.layer.values:
            yield self._divided(bias, rows)
        return Fold(scales, rows)

    def _divided(self, bias: str, scales: np.ndarray) -> Result:
        dtype = self.plan.plain_dtype(self.layer.name(bias))
        new = (self.layer.values[bias] / scales).astype(dtype).astype(np.float32)
        self.layer.put(bias, new)
        return Result(self.layer.name(bias), new, None)


def calibrate(
    plan: SavePlan, sequences: Sequence[Sequence[int]], settings: CalibrationSettings, platform: Platform
) -> Iterator[Result]:
    """Quantizes every layer of the plan; other matrices, and those that do not become integers, are rounded.

    Args:
        plan: plan for a model of a supported family.
        sequences: token ids, all of one length.
        settings: the method.
        platform: device and types that the model runs in.

    Yields:
        The results of `Calibration.results`, then those of the other tensors.

    Raises:
        ConfigError: no matrix of the plan can be calibrated.
        CheckpointError: the model or a kind of layer is not supported, a tensor is missing or a weight is not a number.
    """
    if not any(isinstance(scheme, IntegerScheme) for scheme in plan.layers.values()):
        raise ConfigError(f"--method {settings.method} is for integers; {_names(plan)} can only be rounded")
    config = plan.checkpoint.model_config()
    check_kinds(config, plan.checkpoint.path)
    done = set()
    hidden = _embedded(plan, config, sequences, platform)
    known = {
        spec: jax.device_put(alone(spec, len(sequences[0])), platform.device) for spec in dict.fromkeys(config.layers)
    }
    chosen: list[jax.Array] = []  # for each sequence, the keys that the last indexer has chosen
    for index, spec in enumerate(config.layers):
        layer = CalibratedLayer(plan.checkpoint, config, index, platform)
        around = known[spec]
        contexts = [around.seeing(each) for each in chosen] if spec.chosen_before else [around] * len(hidden)
        for sublayer in layer.sublayers:
            inputs = partial(layer.inputs, hidden=hidden, contexts=contexts)
            results = Calibration(plan, settings, layer, sublayer, inputs).results()
            if sublayer.has_experts:
                results = chain(results, _experts(plan, settings, layer, hidden, contexts))
            try:
                for result in results:
                    done.add(result.name)
                    yield result
            except CheckpointError as error:
                raise CheckpointError(f"{plan.checkpoint.path}: layer {index}: {error}") from None
            if sublayer is layer.sublayers[0] and any(
                later.chosen_before for later in config.layers[index + 1 : index + 2]
            ):
                chosen = list(layer.run_all(chosen_keys, hidden, contexts))
            hidden = layer.outputs(sublayer, hidden, contexts)
    rest = {name: scheme for name, scheme in plan.layers.items() if name not in done}
    _warn_of_rounded(plan, rest)
    yield from round_to_nearest(plan.tensors, rest)


def _warn_of_rounded(plan: SavePlan, rest: Mapping[str, SavedScheme]) -> None:
    """Warns of integer matrices that are not calibrated, except experts, of which `_experts` has warned."""
    names = [name for name, scheme in rest.items() if isinstance(scheme, IntegerScheme) and ".experts." not in name]
    if names:
        logger.warning(
            "%s: not calibrated, but rounded to nearest: %s",
            *(plan.checkpoint.path, ", ".join(names[:4]) + (", …" if len(names) > 4 else "")),
        )


def _experts(
    plan: SavePlan,
    settings: CalibrationSettings,
    layer: CalibratedLayer,
    hidden: Sequence[jax.Array],
    contexts: Sequence[Around],
) -> Iterator[Result]:
    """Calibrates the experts that a token reaches; the others are rounded later, with a warning."""
    missed: list[int] = []
    found = layer.run_all(dispatched, hidden, contexts)
    rows = [(np.asarray(given), np.asarray(chosen)) for given, chosen in found]
    for expert in reached(plan, layer, rows, missed):
        yield from Calibration(plan, settings, expert, expert.sublayer, expert.inputs).results()
    if missed:
        logger.warning(
            "%s: %smlp.experts: no token of the text reaches %s, which are rounded to nearest; "
            "more --calibration-tokens may help",
            plan.checkpoint.path,
            layer.prefix,
            ", ".join(map(str, missed)),
        )


def _names(plan: SavePlan) -> str:
    return ", ".join(sorted({scheme.name for scheme in plan.layers.values()}))


def _embedded(
    plan: SavePlan, config: ModelConfig, sequences: Sequence[Sequence[int]], platform: Platform
) -> list[jax.Array]:
    """The residual stream before the first layer, [T, D] for each sequence, on the device.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    tensor = plan.checkpoint.tensors.get(EMBEDDING)
    if tensor is None:
        raise CheckpointError(f"{plan.checkpoint.path}: tensor {EMBEDDING!r} is missing")
    used, places = np.unique(np.array(sequences), return_inverse=True)
    # This is the model's own embedding, with a vocabulary of only the tokens in use.
    small = replace(config, vocab_size=len(used), layers=(), has_head=False, per_layer=None)
    decoder = Decoder(small, dtype=platform.dtype, activation_dtype=platform.activation_dtype)
    definition, state = nnx.split(decoder)
    params = {}
    for name, shape in shapes_of(state).items():
        stored = plan.checkpoint.tensors.get(f"model.{name}")
        if f"model.{name}" == EMBEDDING:
            values = _rows(FloatRows(tensor), used, tensor.shape)
        elif stored is None:
            raise CheckpointError(f"{plan.checkpoint.path}: tensor 'model.{name}' is missing")
        else:
            values = stored.read(F32)
        if values.shape != shape.shape:
            found, wanted = list(values.shape), list(shape.shape)
            raise CheckpointError(f"{plan.checkpoint.path}: tensor 'model.{name}' has shape {found}, not {wanted}")
        params[tuple(name.split("."))] = nnx.Param(jax.device_put(values.astype(shape.dtype), platform.device))
    model = nnx.merge(definition, nnx.from_flat_state(params))
    tokens = places.reshape(len(sequences), -1).astype(np.int32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return [model.embed(jax.device_put(row, platform.device), positions) for row in tokens]


def _rows(source: FloatRows, used: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Reads the rows in use, f32; the whole matrix is read in blocks."""
    out = np.empty((len(used), shape[1]), np.float32)
    step = source.row_step * max(1, (1 << 22) // (source.row_step * shape[1]))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        first, last = np.searchsorted(used, (start, stop))
        if first < last:
            out[first:last] = source.read(start, stop)[used[first:last] - start]
    return out
