"""One decoder layer during calibration: the order of its projections, its weights on the host, and the layer that runs
with them on the device.

`sublayers_of` is all that calibration knows of models; every `DecoderLayer` can be calibrated. Inputs of projections
are kept as sums over all tokens, so that memory does not grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from llmjax.checkpoint.checkpoint import Checkpoint
from llmjax.errors import CheckpointError
from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.attention.chosen import attend_chosen
from llmjax.models import (
    MLP,
    Attention,
    Experts,
    GatedMLP,
    ModelConfig,
    NormedStream,
    Parallel,
)
from llmjax.models.layers.context import Context
from llmjax.models.layers.latent import Indexer
from llmjax.models.layers.layer import LayerSpec, Mixer
from llmjax.models.layers.residual import TwoMixers
from llmjax.models.layers.rope import rotation
from llmjax.models.modules.latent import LatentAttentionModule
from llmjax.models.modules.layer import DecoderLayer
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.mlp import InnerModule
from llmjax.models.modules.moe import ExpertsModule
from llmjax.models.modules.residual import normed
from llmjax.platforms import Platform

PAGE = 64  # tokens
Found = TypeVar("Found")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Around:
    """The inputs of a layer beside the residual stream, for its mixer and for the second mixer or indexer, if any."""

    mixer: Context
    beside: Context | None = None

    def seeing(self, chosen: jax.Array) -> Around:
        """A copy with the keys that the last indexer has chosen, i32 [T, count]."""
        return replace(self, mixer=replace(self.mixer, chosen=chosen))


Computation = Callable[[DecoderLayer, jax.Array, Around], jax.Array]
"""A function of the layer, the residual stream [T, D] and the layer's other inputs."""


@dataclass(frozen=True)
class Stage:
    """Projections with the same input.

    Attributes:
        modules: names below the layer.
        inputs: computes their input, [T, in]; None: an expert computes it itself.
        source: the module whose outputs are the input, channel by channel, so that scales can be folded into it; None:
            there is none, or other modules read the outputs too.
    """

    modules: tuple[str, ...]
    inputs: Computation | None
    source: str | None


@dataclass(frozen=True)
class Sublayer:
    """A sublayer, or both sublayers of a layer if they are parallel.

    Attributes:
        stages: the stages in order.
        outputs: computes the residual stream after it; None: this is an expert, a part of a sublayer.
        has_experts: whether there are experts, each of which is calibrated with the tokens that reach it.
    """

    stages: tuple[Stage, ...]
    outputs: Computation | None
    has_experts: bool = False


@dataclass(frozen=True)
class Given:
    """Computes the input of a projection by running the part of the layer that contains it.

    Attributes:
        part: name of a mixer or of the feed-forward module.
        module: name of the projection below the layer.
    """

    part: str
    module: str

    def __call__(self, layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
        *path, name = self.module.split(".")
        owner = reduce(getattr, path, layer)  # this layer was merged for this call only
        recorder = _Recorder(getattr(owner, name))
        setattr(owner, name, recorder)
        other, context = layer.spec.beside, around.mixer
        if self.part == layer.spec.mixer.name:
            given = _mixer_input(layer, x, around)
        elif other is not None and self.part == other.name:
            assert around.beside is not None
            given, context = _attention_input(layer, x, around), around.beside
        else:
            given = _mlp_input(layer, x, around)
        getattr(layer, self.part)(given, context)
        assert recorder.given is not None
        return recorder.given


class _Recorder:
    """A projection that records its input."""

    def __init__(self, projection: Linear) -> None:
        self.of = projection
        self.given: jax.Array | None = None

    def __call__(self, x: jax.Array, used: jax.Array | None = None) -> jax.Array:
        self.given = x
        return self.of(x, used)


_INDEXED: Mapping[str, str] = MappingProxyType({"q_a_proj": "wk", "q_b_proj": "wq_b"})
"""Projections of an indexer by the mixer's projection with the same input."""


def sublayers_of(layer: DecoderLayer) -> tuple[Sublayer, ...]:
    """The sublayers of a layer, in order; one entry for both if they are parallel."""
    spec = layer.spec
    mixers = _mixer_stages(layer, spec.mixer)
    if spec.beside is not None:  # its input is the mixer's, except for a factor
        mixers = _side_by_side(mixers, _mixer_stages(layer, spec.beside))
    if spec.feed_forward is None:
        return (Sublayer(mixers, _attention_output),)
    fed, has_experts = _feed_forward_stages(layer), isinstance(spec.feed_forward, Experts)
    if not isinstance(spec.residual, Parallel):
        return Sublayer(mixers, _attention_output), Sublayer(fed, _mlp_output, has_experts)
    if spec.residual.before_feed_forward is not None:
        return (Sublayer((*mixers, *fed), _both_outputs, has_experts),)
    return (Sublayer(_side_by_side(mixers, fed), _both_outputs, has_experts),)


def _side_by_side(one: tuple[Stage, ...], other: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The stages of two parallel parts; their first stages become one if both read the same source."""
    if not one or not other or one[0].source != other[0].source or one[0].source is None:
        alone = (replace(stages[0], source=None) for stages in (one, other) if stages)
        return (*alone, *one[1:], *other[1:])
    return (replace(one[0], modules=(*one[0].modules, *other[0].modules)), *one[1:], *other[1:])


def _mixer_stages(layer: DecoderLayer, mixer: Mixer) -> tuple[Stage, ...]:
    norm, part = _of_part_alone(layer, layer.spec.residual.before_mixer), getattr(layer, mixer.name)
    if layer.spec.indexer is not None:
        norm = None  # the indexer's head weights, which are not quantized, read the norm too
    if isinstance(mixer, Attention):
        first = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj") if hasattr(part, name))
        # An operation between the two, such as a norm, would undo or change the folded scales.
        unlike = mixer.o_norm is not None or mixer.v_norm is not None or mixer.clip is not None
        source = None if unlike or mixer.values_of_keys else "self_attn.v_proj"
        return Stage(first, _attention_input, norm), Stage(("self_attn.o_proj",), _heads, source)
    first, *others = mixer.projections
    names = tuple(name for name in first if hasattr(part, name))
    stages = [Stage((*(f"{mixer.name}.{name}" for name in names), *_indexed(layer, names)), _attention_input, norm)]
    for (name,) in others:
        module = f"{mixer.name}.{name}"
        if hasattr(part, name):
            inputs: Computation = _latent if name == "kv_b_proj" else Given(mixer.name, module)
            if name == "o_proj" and _sees_few(layer.spec):
                inputs = _values_of_chosen
            stages.append(Stage((module, *_indexed(layer, (name,))), inputs, None))
    return tuple(stages)


def _indexed(layer: DecoderLayer, names: Iterable[str]) -> tuple[str, ...]:
    """The projections of the layer's indexer, if any, that have the same inputs as these of its mixer."""
    if layer.spec.indexer is None:
        return ()
    return tuple(f"{Indexer.name}.{_INDEXED[name]}" for name in names if name in _INDEXED)


def _feed_forward_stages(layer: DecoderLayer) -> tuple[Stage, ...]:
    part, norm = layer.spec.feed_forward, _of_part_alone(layer, _before_feed_forward(layer))
    assert part is not None
    match part:
        case GatedMLP():
            return (
                Stage(("mlp.gate_proj", "mlp.up_proj"), _mlp_input, norm),
                Stage(("mlp.down_proj",), _inner, "mlp.up_proj" if part.down_norm is None else None),
            )
        case MLP():  # the activation is between its projections
            name = part.name
            return Stage((f"{name}.up_proj",), _mlp_input, norm), Stage((f"{name}.down_proj",), _inner, None)
        case Experts():
            latent: tuple[Stage, ...] = ()
            if part.latent is not None:
                names = (f"{part.name}.{name}" for name in ("fc1_latent_proj", "fc2_latent_proj"))
                latent = tuple(Stage((name,), Given(part.name, name), None) for name in names)
            if part.shared is None:
                return latent
            # The router and the other experts read the norm too, so nothing is folded into it.
            shared = f"{part.name}.{part.shared.name}"
            first = ("gate_proj", "up_proj") if part.gated else ("up_proj",)
            return (
                *latent,
                Stage(tuple(f"{shared}.{name}" for name in first), Given(part.name, f"{shared}.{first[0]}"), None),
                Stage((f"{shared}.down_proj",), Given(part.name, f"{shared}.down_proj"), None),
            )


def _of_part_alone(layer: DecoderLayer, norm: str | None) -> str | None:
    """A norm that only one sublayer reads, so that scales can be folded into its weights; None: the residual stream
    itself is normed, or the norm has no weights."""
    return None if isinstance(layer.spec.residual, NormedStream) or not layer.spec.norm.weighted else norm


def _attention_input(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    return normed(x, layer.norm(layer.spec.residual.before_mixer))


def _mixer_input(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    n, names = _attention_input(layer, x, around), layer.spec.residual
    return names.given * n if isinstance(names, TwoMixers) and names.given != 1 else n


def _latent_mixer(layer: DecoderLayer) -> LatentAttentionModule:
    assert isinstance(layer.mixer, LatentAttentionModule)
    return layer.mixer


def _latent(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    """The input that ``kv_b_proj`` would have if it were not absorbed."""
    mixer = _latent_mixer(layer)
    return mixer.kv_a_layernorm(mixer.kv_a_proj_with_mqa(_attention_input(layer, x, around))[:, : mixer.spec.kv_rank])


def _sees_few(spec: LayerSpec) -> bool:
    return spec.indexer is not None or spec.chosen_before


def chosen_keys(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    """Positions of the keys that the mixer reads, i32 [T, count]: the choice of the layer's indexer or of an earlier
    one."""
    if layer.spec.indexer is None:
        assert around.mixer.chosen is not None
        return around.mixer.chosen
    n = _attention_input(layer, x, around)
    chosen: jax.Array = getattr(layer, Indexer.name)(n, _latent_mixer(layer).latent_queries(n), around.beside)[0]
    return chosen


def _values_of_chosen(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    """The input of ``o_proj`` with attention to the chosen keys."""
    attend = partial(attend_chosen, chosen=chosen_keys(layer, x, around))
    return _latent_mixer(layer).values(_attention_input(layer, x, around), around.mixer, attend)[0]


def _heads(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    mixer: Any = layer.mixer  # whichever has heads
    heads: jax.Array = mixer.heads(_mixer_input(layer, x, around), around.mixer)[0]
    return heads


def _attention_output(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    if _sees_few(layer.spec):
        return layer.mix_chosen(x, around.mixer, around.beside)[0]
    if around.beside is not None:
        return layer.mix_both(x, around.mixer, around.beside)[0]
    return layer.mix(x, around.mixer)[0]


def _mlp_input(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    return normed(x, layer.norm(_before_feed_forward(layer)))


def _before_feed_forward(layer: DecoderLayer) -> str | None:
    names = layer.spec.residual
    is_same = isinstance(names, Parallel) and names.before_feed_forward is None
    return names.before_mixer if is_same else names.before_feed_forward


def _inner(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    assert isinstance(layer.part, InnerModule)
    return layer.part.inner(_mlp_input(layer, x, around))


def _mlp_output(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    return layer.feed_forward(x, around.mixer)


def _both_outputs(layer: DecoderLayer, x: jax.Array, around: Around) -> jax.Array:
    return layer.mix_and_feed(x, around.mixer)[0]


def dispatched(layer: DecoderLayer, x: jax.Array, around: Around) -> tuple[jax.Array, jax.Array]:
    """The inputs of experts, [N, in], and the chosen experts, i32 [N, choices of each row]."""
    assert isinstance(layer.part, ExpertsModule)
    given, chosen, _ = layer.part.dispatched(_mlp_input(layer, x, around), around.mixer)
    return given, chosen


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Means over the inputs of a projection.

    Attributes:
        gram: f64 [in, in], mean of x xᵀ, which is half the Hessian of the squared error of outputs.
        magnitude: f64 [in], mean of |x|.
    """

    gram: np.ndarray
    magnitude: np.ndarray

    @classmethod
    def of(cls, inputs: Iterable[jax.Array], *, tokens: int | None = None) -> InputStatistics:
        """The means over inputs, float [tokens, in] each.

        Args:
            tokens: number of tokens if the other rows are zeros; None: all rows are tokens.
        """
        count, sums = 0, None
        for x in inputs:
            count += len(x)
            added = _sums(x)
            sums = added if sums is None else tuple(map(jnp.add, sums, added))
        assert sums is not None
        gram, magnitude = (np.asarray(total, np.float64) / (tokens or count) for total in sums)
        return cls(gram, magnitude)

    def divided(self, scales: np.ndarray) -> InputStatistics:
        """The statistics after the channels of the inputs are divided by scales [in]."""
        return InputStatistics(self.gram / np.outer(scales, scales), self.magnitude / scales)

    def energy(self, weights: np.ndarray) -> float:
        """Mean squared length of the outputs of weights f32 [out, in]."""
        # Rounding may make a tiny sum negative.
        return max(0.0, float(np.vdot(weights @ self._gram, weights)))

    @cached_property
    def _gram(self) -> np.ndarray:
        return self.gram.astype(np.float32)


@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    gram = jax.lax.dot_general(wide, wide, (((0,), (0,)), ((), ())), precision="highest")
    return gram, jnp.abs(wide).sum(axis=0)


F32 = np.dtype(np.float32)


def check_kinds(config: ModelConfig, path: Path) -> None:
    """Checks every kind of layer before any is calibrated.

    Args:
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: a kind of layer is not supported.
    """
    for spec in dict.fromkeys(config.layers):
        if spec.state_of is not None or spec.per_layer is not None or spec.scaled:
            raise CheckpointError(
                f"{path}: layers with embeddings or factors of their own, or keys of others, cannot be calibrated"
            )
        layer = DecoderLayer(spec, config.hidden_size, dtype=jnp.dtype(F32))
        shapes = shapes_of(nnx.split(layer)[1])
        for module in (
            module for sublayer in sublayers_of(layer) for stage in sublayer.stages for module in stage.modules
        ):
            if f"{module}.weight" not in shapes:
                raise CheckpointError(f"{path}: layers without {module} cannot be calibrated")


def shapes_of(state: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a layer's parameters, by name."""
    return {".".join(map(str, path)): parameter.get_value() for path, parameter in nnx.to_flat_state(state)}


class CalibratedLayer:
    """A layer with weights that are replaced one after the other.

    Args:
        checkpoint: holds the weights.
        config: config of the model.
        index: index of the layer, of a kind that `check_kinds` accepts.
        platform: device and types that the model runs in.

    Attributes:
        prefix: prefix of its tensors' names.
        spec: the spec of the layer.
        sublayers: the sublayers to calibrate, in order.
        values: f32 weights by name below the prefix; read when the layer is made.
        device, dtype: the device that the model runs on, and the type of its matrices.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, index: int, platform: Platform) -> None:
        self.prefix = f"model.layers.{index}."
        self.spec: LayerSpec = config.layers[index]
        layer = DecoderLayer(self.spec, config.hidden_size, dtype=platform.dtype)
        self.sublayers: tuple[Sublayer, ...] = sublayers_of(layer)
        self._definition, state = nnx.split(layer)
        self.device, self.dtype = platform.device, platform.dtype
        self._shapes = shapes_of(state)
        self._weights: dict[str, jax.Array] = {}
        self.values: dict[str, np.ndarray] = {}
        for name, shape in self._shapes.items():
            tensor = checkpoint.tensors.get(self.prefix + name)
            if tensor is None or tuple(tensor.shape) != shape.shape:
                found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, not {list(shape.shape)}"
                raise CheckpointError(f"{checkpoint.path}: tensor {self.prefix + name!r} {found}")
            self.put(name, tensor.read(F32))

    def put(self, name: str, values: np.ndarray) -> None:
        """Replaces a weight, f32 of the tensor's shape."""
        self.values[name] = values
        self._weights[name] = jax.device_put(values.astype(self._shapes[name].dtype), self.device)

    def name(self, name: str) -> str:
        """The name of a tensor in the model."""
        return self.prefix + name

    def inputs(self, stage: Stage, hidden: Sequence[jax.Array], contexts: Sequence[Around]) -> InputStatistics:
        """Statistics of the inputs of a stage's projections.

        Args:
            hidden: the residual stream before the sublayer, [T, D] for each sequence.
            contexts: the other inputs, for each sequence.
        """
        assert stage.inputs is not None
        return InputStatistics.of(self.run_all(stage.inputs, hidden, contexts))

    def outputs(self, sublayer: Sublayer, hidden: Sequence[jax.Array], contexts: Sequence[Around]) -> list[jax.Array]:
        """The residual stream after the sublayer."""
        assert sublayer.outputs is not None
        return list(self.run_all(sublayer.outputs, hidden, contexts))

    def run_all(
        self,
        compute: Callable[[DecoderLayer, jax.Array, Around], Found],
        hidden: Sequence[jax.Array],
        contexts: Sequence[Around],
    ) -> Iterator[Found]:
        """`run` for each sequence."""
        return (self.run(compute, x, context) for x, context in zip(hidden, contexts, strict=True))

    def run(self, compute: Callable[[DecoderLayer, jax.Array, Around], Found], x: jax.Array, context: Around) -> Found:
        """Runs a computation with the layer's current weights."""
        out: Found = _run(compute, self._definition, self._weights, x, context)
        return out


@partial(jax.jit, static_argnums=(0, 1))
def _run(
    compute: Callable[..., Any], definition: Any, weights: dict[str, jax.Array], x: jax.Array, context: Around
) -> Any:
    paths = {tuple(name.split(".")): nnx.Param(value) for name, value in weights.items()}
    return compute(nnx.merge(definition, nnx.from_flat_state(paths)), x, context)


def alone(spec: LayerSpec, length: int) -> Around:
    """The inputs of a layer beside the residual stream for one sequence by itself.

    Args:
        length: tokens of the sequence.
    """
    beside = None if spec.other is None else _context(spec.other, length)
    return Around(_context(spec.mixer, length), beside)


def _context(mixer: Mixer | Indexer, length: int) -> Context:
    count = -(-length // PAGE)
    pages = mixer.state.make(num_pages=1 + count, page_size=PAGE, dtype=jnp.dtype(jnp.float32))
    by = None if mixer.rope is None else rotation(jnp.arange(length, dtype=jnp.int32), mixer.rope, length)
    batch = RaggedBatch(
        query_start=jnp.array([0, length], jnp.int32),
        kv_len=jnp.array([length], jnp.int32),
        page_table=1 + jnp.arange(count, dtype=jnp.int32)[None],
        kv_index=PAGE + jnp.arange(length, dtype=jnp.int32),
    )
    return Context(by, pages, batch)
