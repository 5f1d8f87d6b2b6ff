"""A model ready to run: its definition, its weights on the device, and where they came from."""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from llmjax import models
from llmjax.adapters.merge import merged
from llmjax.adapters.own import own_adapter, own_config
from llmjax.adapters.read import AdapterReader
from llmjax.adapters.reference import AdapterReference
from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.identity import identity
from llmjax.checkpoint.kv_scales import is_kv_scale, kv_calibration
from llmjax.checkpoint.resolve import resolve_model
from llmjax.config import EngineConfig
from llmjax.engine.adapters.of_encoder import EncoderAdapters, adaptable_of_encoder
from llmjax.engine.adapters.stacks import AdapterStacks, adaptable_shapes, adapted_shapes
from llmjax.engine.front.token_labels import with_token_labels
from llmjax.engine.loading.copies import with_copies
from llmjax.engine.loading.dummy import with_dummy_weights
from llmjax.engine.loading.memory import check_weights, kept_bytes, plan_kv, weight_bytes
from llmjax.engine.loading.need import Unread
from llmjax.engine.loading.packed_weights import PackedWeights
from llmjax.engine.loading.placement import Placer
from llmjax.engine.programs.cache import ProgramCache
from llmjax.errors import CheckpointError, ConfigError
from llmjax.kernels.attention import KVLayout
from llmjax.kernels.cpu.library import library
from llmjax.kernels.offloading import SplitStack
from llmjax.kernels.panels import PanelTensor
from llmjax.kernels.qtensor import QTensor
from llmjax.models import Attention, Experts, ModelGraph
from llmjax.models.config import ModelConfig
from llmjax.models.vision.spec import VisionSpec
from llmjax.parallel.division import Division
from llmjax.parallel.stages import Stage
from llmjax.platforms import Platform
from llmjax.quantization.plan import PLAIN, STORED, Kept, QuantizationPlan
from llmjax.weights.memory import HugePages
from llmjax.weights.panels import in_panels, panels_help

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from llmjax.models.vision.functional import EncoderGraph

T = TypeVar("T")

# Buffers that old checkpoints carry and that are computed here.
IGNORED_SUFFIXES = (
    "embeddings.position_ids",
    "pooler.dense.weight",  # BERT's pooler of the first token, trained on sentence pairs
    "pooler.dense.bias",
    ".rotary_emb.inv_freq",
    ".rotary_pos_emb.inv_freq",  # ChatGLM
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",  # GPT-NeoX
    ".attention.masked_bias",
    *(f".self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),  # MiniMax
)


@dataclass(frozen=True)
class LoadedEncoder:
    """A loaded encoder of images."""

    graph: EncoderGraph
    params: dict[str, jax.Array | QTensor | PanelTensor | SplitStack]  # by name
    adapters: EncoderAdapters | None = None  # the form of what adapters change of it; None: there are no adapters

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in self.params.values())


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, as the runner needs it."""

    config: ModelConfig
    graph: ModelGraph  # the part of the model on each device; only its stage's layers where layers are divided
    params: dict[str, jax.Array | QTensor | SplitStack]  # by Hugging Face name
    checkpoint: Checkpoint
    path: Path
    load_seconds: float
    mapped_bytes: int = 0  # bytes of weights that take memory only when a step reads them
    kv_calibration: npt.NDArray[np.float32] | None = None  # see `quantization.kv_scales.kv_calibration`
    encoder: LoadedEncoder | None = None  # of images; None: the model sees none
    adapters: AdapterStacks | None = None  # places for adapters; None: it has none
    own_adapter: AdapterReference | None = None  # the model's, for prompts with pictures; None: it has none
    fused: Path | None = None  # the adapter that is merged into the weights
    dequantized_from: str = ""  # how the checkpoint stores what the device has no kernels for

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, and of the places for adapters."""
        encoder = 0 if self.encoder is None else self.encoder.num_bytes
        adapters = 0 if self.adapters is None else self.adapters.num_bytes
        return sum(weight.nbytes for weight in self.params.values()) + encoder + adapters

    @property
    def files(self) -> tuple[tuple[str, int, int, int, int], ...]:
        """The `identity` of all files that the weights come from."""
        return identity(self.path) + (() if self.fused is None else identity(self.fused))

    @property
    def digest(self) -> str:
        """A digest of what is the same on every rank: the model's definition, and the shapes and types of its weights,
        not their values; where ranks have different layers, the type of their hidden states in place of the weights."""
        if self.graph.config.embeds and self.graph.config.has_head:
            description = repr(
                (self.config, [(name, _kind_of(weight)) for name, weight in sorted(self.params.items())])
            )
        else:
            description = repr((self.config, str(self.graph.activation_dtype)))
        return hashlib.sha256(description.encode()).hexdigest()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the weights in the host's memory."""
        return sum(weight.offloaded.nbytes for weight in self.params.values() if isinstance(weight, SplitStack))


def _kind_of(weight: jax.Array | QTensor | SplitStack) -> str:
    leaves = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(weight)]
    return repr((leaves, weight.format if isinstance(weight, QTensor) else None))


def check_stages(config: EngineConfig) -> None:
    """Checks that the model can be divided into the stages, before a process is started for each.

    Raises:
        CheckpointError: the model cannot be found or read.
        ConfigError: it cannot be divided so, or run with these settings.
    """
    checkpoint = _open(config, resolve_model(config))
    model = checkpoint.model_config(max_model_len=config.max_model_len)
    _check_chunks(model, config.page_size)
    for number in range(config.pipeline_parallel_size):
        Stage.of(model, number=number, count=config.pipeline_parallel_size)


def load_model(
    config: EngineConfig,
    platform: Platform,
    *,
    path: Path | None = None,
    cache_dir: Path | None = None,
    programs: ProgramCache | None = None,
    progress: bool = True,
    reading: Callable[[Unread], None] | None = None,
    places: bool = True,
) -> LoadedModel:
    """Resolves, opens, checks and loads the model that the configuration names.

    Args:
        path: where the model is, if it has been resolved.
        cache_dir: where packed weights are kept from start to start; None: nowhere.
        programs: the cache of programs, and of what models declare.
        progress: whether to show a progress bar in a terminal.
        reading: called before weights are read, and before it is checked whether there is room for them.
        places: whether places for adapters are made.

    Raises:
        CheckpointError: a file, key or tensor is missing or wrong; raised before weights are read where possible.
        ConfigError: the model cannot run with these settings; raised before weights are read.
    """
    path = resolve_model(config) if path is None else path
    started = time.monotonic()
    files = identity(path)
    checkpoint = with_token_labels(_open(config, path))
    programs = ProgramCache() if programs is None else programs
    if config.lora_fused is not None:
        checkpoint = _fused(checkpoint, Path(config.lora_fused), config, platform, programs)
    model_config = checkpoint.model_config(max_model_len=config.max_model_len)
    _check_chunks(model_config, config.page_size)
    stage = Stage.of(model_config, number=config.stage, count=config.pipeline_parallel_size)
    division = Division(stage.config, len(platform.devices), whole_experts=config.enable_expert_parallel)
    if config.enable_expert_parallel and division.devices == 1:
        logger.warning("enable_expert_parallel changes nothing: one device has all experts (see tensor_parallel_size)")
    _check_tensors(checkpoint, declare(model_config, platform, programs)[1])
    whole, shapes = declare(stage.config, platform, programs)
    graph = whole if division.devices == 1 else declare(division.local, platform, programs)[0]
    calibration = kv_calibration(
        checkpoint,
        config.quantization_param_path,
        dtype=platform.kv_dtype(config.kv_cache_dtype),
        model=model_config,
    )
    if calibration is not None:
        calibration = calibration[stage.layers.start : stage.layers.stop]
    dequantized = "" if platform.has_own_kernels or config.quantization else _stored_as(checkpoint)
    plan = QuantizationPlan.of(
        PLAIN if dequantized else config.quantization,
        config.quantization_rules,
        model_config,
        stored=checkpoint.quantization,
    )
    parameters = list(zip(whole.names, whole.axes, strict=True))

    def kept(plan: QuantizationPlan, name: str) -> Kept:
        is_plain = len(shapes[name].shape) < 2 or name in graph.plain
        return Kept(None) if is_plain else plan.keep(checkpoint.tensors[stage.stored(name)])

    def num_bytes(plan: QuantizationPlan) -> int:
        """The bytes of this process's weights that each device has at least."""
        tile, sizes = platform.weight_tile, ((kept(plan, name).source, shapes[name]) for name, _ in parameters)
        total = sum(kept_bytes(source, shape.shape, shape.dtype, tile=tile) for source, shape in sizes)
        return total // len(platform.devices)

    adapters, own = None, own_adapter(checkpoint) if places else None
    if places and (config.enable_lora or own is not None):
        ranks = [config.max_lora_rank] * config.enable_lora + (
            [] if own is None else [own_config(checkpoint).most_rank]
        )
        adapters = AdapterStacks.of(
            whole,
            shapes,
            places=config.max_loras,
            rank=max(ranks),
            division=division,
            platform=platform,
            whole=adapted_shapes(*declare(model_config, platform, programs), replace(division, config=model_config)),
            stored=stage.stored,
        )
    if reading is not None:
        encoder_bytes = weight_bytes(checkpoint.vision_tensors, platform)
        places_bytes = 0 if adapters is None else adapters.needed_bytes
        whole_bytes = num_bytes(plan) * len(platform.devices) + encoder_bytes + places_bytes
        reading(Unread(model=graph.config, weight_bytes=whole_bytes, calibrated=calibration is not None))
    if platform.is_cpu:  # before anything is read: what does not fit would be swapped, or end the process
        needed = num_bytes(plan)
        check_weights(
            needed,
            platform.free_memory(),
            quantized=lambda scheme: num_bytes(QuantizationPlan.of(scheme, {}, model_config)),
        )
        if model_config.causal and not config.is_staged:
            layout = KVLayout.of(
                platform.kv_dtype(config.kv_cache_dtype),
                page_size=config.page_size,
                calibrated=calibration is not None,
            )
            sized = config.with_sizes(platform.step_sizes)
            plan_kv(sized, graph.config, platform, layout=layout, reserved=needed)
    # Packed matrices are known by the model's files alone.
    kept_in = None if config.load_format == "dummy" or config.lora_fused is not None else cache_dir
    packed = PackedWeights.of(kept_in, config, checkpoint, platform, files=files)
    placer = Placer(
        platform,
        activations=platform.quantized_activations,
        offloaded=_offloaded_experts(config, division.local),
        packed=packed,
    )
    params: dict[str, jax.Array | QTensor | SplitStack] = {}
    misfits: dict[str, list[str]] = {}
    for name, axes in _shown(parameters) if progress else parameters:
        tensor, shape, one = checkpoint.tensors[stage.stored(name)], shapes[name], kept(plan, name)
        if one.misfit:
            misfits.setdefault(one.misfit, []).append(name)
        params[name] = placer.place(name, tensor, one, shape, cut=division.cut(name, axes, shape.shape))
    if config.dequantized_copies:
        params = with_copies(params, without=frozenset(graph.without_layers.names))
    if adapters is not None:
        adapters.make()
    encoder = None if checkpoint.vision is None else _load_encoder(checkpoint, platform, programs, placer)
    if encoder is not None and adapters is not None and config.enable_lora:
        adaptable = _adaptable_of_encoder(checkpoint, platform, programs)
        of_encoder = EncoderAdapters.of(adaptable, rank=adapters.layout.rank)
        encoder = replace(encoder, adapters=of_encoder)
    jax.block_until_ready((params, None if encoder is None else encoder.params))
    packed.keep() if identity(path) == files else packed.discard()
    for misfit, names in misfits.items():
        logger.warning("rows of %d matrices, for example %s, do not fill blocks of %s", len(names), names[0], misfit)
    if names := placer.dequantized:
        logger.warning(
            "%d matrices, for example %s, are dequantized: %d devices would have to divide groups of their columns",
            *(len(names), names[0], division.devices),
        )
    if dequantized:
        logger.info(
            "weights are stored as %s and dequantized, for %s has no kernels for them; set --quantization %s to keep "
            "them as they are, in less memory and with more to compute in every step",
            *(dequantized, platform.name, STORED),
        )
    _warn_of_slow_products(params, platform)
    seconds = time.monotonic() - started
    return LoadedModel(
        config=model_config,
        graph=graph,
        params=params,
        checkpoint=checkpoint,
        path=path,
        load_seconds=seconds,
        mapped_bytes=packed.mapped_bytes if platform.is_cpu else 0,
        dequantized_from=dequantized,
        kv_calibration=calibration,
        encoder=encoder,
        adapters=adapters,
        own_adapter=own,
        fused=None if config.lora_fused is None else Path(config.lora_fused),
    )


def _fused(
    checkpoint: Checkpoint, path: Path, config: EngineConfig, platform: Platform, programs: ProgramCache
) -> Checkpoint:
    """The checkpoint with an adapter merged into it."""
    model = checkpoint.model_config(max_model_len=config.max_model_len)
    graph, declared = declare(model, platform, programs)
    reader = AdapterReader(
        checkpoint,
        model,
        adaptable_shapes(graph, declared),
        most_rank=sys.maxsize,
        of_encoder=_adaptable_of_encoder(checkpoint, platform, programs),
    )
    adapter = reader.read(path, digest="")
    count = len(adapter.parts) + len(adapter.of_encoder)
    logger.info("%s is merged into the weights: %d matrices change", path, count)
    return merged(checkpoint, adapter)


def _open(config: EngineConfig, path: Path) -> Checkpoint:
    """The checkpoint that the configuration asks for; with random weights, where it asks for them."""
    dummy = config.load_format == "dummy"
    checkpoint = open_checkpoint(
        path,
        overrides=config.hf_overrides,
        runner=config.runner_of_task,
        convert=config.conversion,
        mmproj=config.mmproj,
        weights=not dummy,
    )
    return with_dummy_weights(checkpoint, max_model_len=config.max_model_len) if dummy else checkpoint


def _load_encoder(checkpoint: Checkpoint, platform: Platform, programs: ProgramCache, placer: Placer) -> LoadedEncoder:
    """The encoder of images, whose matrices are kept as plain numbers, in panels where that is faster.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    stored = checkpoint.vision_tensors
    assert checkpoint.vision is not None
    graph, shapes = _declare_encoder(checkpoint.vision, platform, programs)
    for name, shape in shapes.items():
        if name not in stored:
            raise CheckpointError(f"{checkpoint.path}: tensor {name} of the encoder of images is missing")
        if tuple(stored[name].shape) != tuple(shape.shape):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {stored[name].name} has shape {list(stored[name].shape)}, the config asks "
                f"for {list(shape.shape)}"
            )
    params: dict[str, jax.Array | QTensor | PanelTensor | SplitStack] = {}
    memory = HugePages()
    for name, shape in shapes.items():
        weight = placer.place(name, stored[name], Kept(None), shape, cut=None)
        alone = platform.is_cpu and platform.sharding is None and isinstance(weight, jax.Array)
        params[name] = in_panels(weight, memory) if alone and panels_help(name, shape) else weight
    return LoadedEncoder(graph, params)


def _check_chunks(model: ModelConfig, page_size: int) -> None:
    """Refuses pages of which chunks of attention do not consist (see ``by_chunk``)."""
    for chunk in {layer.mixer.chunk for layer in model.layers if isinstance(layer.mixer, Attention)} - {None}:
        assert chunk is not None
        if chunk % page_size:
            fitting = max(size for size in range(1, page_size + 1) if chunk % size == 0)
            raise ConfigError(
                f"page_size {page_size}: the model's attention_chunk_size, {chunk}, is not a multiple of it; "
                f"set page_size to {fitting}, or max_model_len to {chunk} or less"
            )


def _stored_as(checkpoint: Checkpoint) -> str:
    """The format of quantized matrices; empty: there are none."""
    matrices = (tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1)
    return checkpoint.quantization if any(tensor.row_source() is not None for tensor in matrices) else ""


def declare(
    config: ModelConfig, platform: Platform, programs: ProgramCache
) -> tuple[ModelGraph, dict[str, jax.ShapeDtypeStruct]]:
    """Does what ``models.abstract_model`` does, which needs Flax: its result is kept, so later starts need no Flax."""
    types = {"dtype": platform.dtype, "activation_dtype": platform.activation_dtype}
    parts = ("what a model declares", config, types)
    return programs.kept(parts, lambda: models.abstract_model(config, **types))


def _declare_encoder(
    spec: VisionSpec, platform: Platform, programs: ProgramCache
) -> tuple[EncoderGraph, dict[str, jax.ShapeDtypeStruct]]:
    """What ``abstract_encoder`` does, as `declare`."""
    types = {"dtype": platform.dtype, "activation_dtype": platform.activation_dtype}

    def declared() -> tuple[EncoderGraph, dict[str, jax.ShapeDtypeStruct]]:
        from llmjax.models.vision.functional import abstract_encoder  # with Flax, which most starts do without

        return abstract_encoder(spec, **types)

    return programs.kept(("what an encoder declares", spec, types), declared)


def _adaptable_of_encoder(
    checkpoint: Checkpoint, platform: Platform, programs: ProgramCache
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the encoder of images that adapters may change; none where there is no encoder."""
    if checkpoint.vision is None:
        return {}
    graph, shapes = _declare_encoder(checkpoint.vision, platform, programs)
    return adaptable_of_encoder(shapes, graph.plain)


def _shown(weights: Sequence[T]) -> Iterable[T]:
    """With a progress bar, if people see it; standard output belongs to generated text."""
    if not sys.stderr.isatty():
        return weights
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(weights, "Loading weights", console=console, transient=True)


def _offloaded_experts(config: EngineConfig, model: ModelConfig) -> int:
    """How many experts of each layer lie in the host's memory; ``model`` is that of a device."""
    halves = [layer.feed_forward for layer in model.layers]
    wanted = config.num_experts_offload_per_rank
    there = min((half.stacked for half in halves if isinstance(half, Experts)), default=0)
    if wanted and wanted >= there:
        raise ConfigError(
            f"num_experts_offload_per_rank is {wanted}; "
            + (
                f"a device has {there} experts of each layer, one of which must stay there"
                if there
                else "the model has no experts"
            )
        )
    return wanted


def _warn_of_slow_products(params: Mapping[str, jax.Array | QTensor | SplitStack], platform: Platform) -> None:
    if platform.is_cpu and library() is None and any(isinstance(weight, QTensor) for weight in params.values()):
        logger.warning(
            "quantized weights without the C++ kernels: every product dequantizes its matrix again, ten times slower "
            "than with weights that are dequantized once; if memory allows those, set --quantization none"
        )


def _check_tensors(checkpoint: Checkpoint, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    missing = [name for name in shapes if name not in checkpoint.tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]}{more} is missing")
    for name, shape in shapes.items():
        found = tuple(checkpoint.tensors[name].shape)
        if found != tuple(shape.shape):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} has shape {list(found)}, the config asks for {list(shape.shape)}"
            )
    unused = [
        n for n in checkpoint.tensors if n not in shapes and not n.endswith(IGNORED_SUFFIXES) and not is_kv_scale(n)
    ]
    for name in unused:
        module, _, kind = name.rpartition(".")
        # Exporters of GPTQ write zeros where there is no bias.
        if (
            kind == "bias"
            and f"{module}.weight" in shapes
            and checkpoint.tensors[name].read(np.dtype(np.float32)).any()
        ):
            raise CheckpointError(f"{checkpoint.path}: tensor {name} is a bias, which the config says there is none of")
    if unused:
        logger.warning("%d tensors of %s are not used, for example %s", len(unused), checkpoint.path, unused[0])
