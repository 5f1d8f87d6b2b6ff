"""The step compiler: makes the specification of each bucket's step program and the device state, and compiles steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from llmjax.engine.device.batch import BatchLayout, Bucket, make_buckets
from llmjax.engine.device.device_state import DeviceState, Ends, make_device_state
from llmjax.engine.device.encoder_state import without_patches
from llmjax.engine.device.media import MediaShape
from llmjax.engine.device.step import pass_on, sample_masked, step
from llmjax.engine.drafts.proposal import DraftGraph
from llmjax.engine.loading.memory import KVPlan, ProgramMemory
from llmjax.engine.loading.model import LoadedEncoder, LoadedModel
from llmjax.engine.programs.cache import Executable, ProgramCache, ProgramSpec
from llmjax.engine.programs.encode import batch_shapes, encode_part, parts_of
from llmjax.errors import CompileError, ConfigError
from llmjax.kernels.choices import Choices
from llmjax.kernels.sharding import Axes
from llmjax.platforms import Platform
from llmjax.sampling.masks import mask_words

# Tokens of the largest step that is a CUDA graph wherever others are: with more, computing takes longer than starting
# kernels one by one, while a graph of a prompt waits some milliseconds for its addresses.
GRAPH_TOKENS = 256
MEDIA_ROWS = 8192  # rows of the media pool, and so of an image, at most
# Multiplications of a part of an encoder's run at most, if that is more than a layer. Streams wait for a part: on a CPU
# it takes some tens of milliseconds, elsewhere a few.
PART_PRODUCTS = MappingProxyType({True: 1e10, False: 1e12})  # on a CPU, and elsewhere


@dataclass(frozen=True, kw_only=True)
class StepCompiler:
    """Compiles the step for each bucket; may be used from several threads.

    Args:
        model: weights and definition.
        platform: where they are.
        kv_plan: shape of the KV cache.
        max_num_seqs: slots.
        max_num_batched_tokens: tokens of the largest step.
        max_logprobs: top alternatives reported.
        decode_steps: decode steps a dispatch may take.
        drafts: most drafts of a row that a step may verify.
        drafted_rows: most rows of a step with drafts.
        draft_model: the model that makes drafts; None: the host makes them.
        options: XLA's compiler options.
        prompt_options: those of steps of more than `GRAPH_TOKENS` tokens of prompts; None: the same.
        cache: where programs are kept from start to start.
        choices: which methods compute products.
    """

    model: LoadedModel
    platform: Platform
    kv_plan: KVPlan
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    decode_steps: int = 1
    drafts: int = 0
    drafted_rows: int = 0
    draft_model: LoadedModel | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    prompt_options: Mapping[str, str] | None = None
    cache: ProgramCache = field(default_factory=ProgramCache)
    choices: Choices = field(default_factory=Choices)

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """The weights, as ``step`` takes them."""
        drafts = () if self.draft_model is None else self.draft_model.params.values()
        return (*self.model.params.values(), *drafts)

    @property
    def adapted_weights(self) -> tuple[jax.Array, ...]:
        """The weights and the arrays of adapters, as ``step`` takes them where rows have adapters."""
        adapters = self.model.adapters
        return (*self.weights, *(() if adapters is None else adapters.arrays))

    @cached_property
    def _draft_graph(self) -> DraftGraph | None:
        draft, spans = self.draft_model, tuple(group.span for group in self.kv_plan.groups)
        return None if draft is None else DraftGraph(draft.graph, tuple(draft.params), spans)

    @property
    def generates(self) -> bool:
        """Whether tokens are sampled; else vectors are made."""
        return self.model.config.pooler is None

    @cached_property
    def layouts(self) -> dict[Bucket, BatchLayout]:
        """All buckets, and how their batches are packed."""
        buckets = make_buckets(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            decode_steps=self.decode_steps,
            generates=self.generates,
            drafts=self.drafts,
            drafted_rows=self.drafted_rows,
            spans=self.media is not None and self.media.whole,
            adapters=self.model.adapters is not None,
        )
        return {
            bucket: BatchLayout(
                bucket=bucket,
                num_slots=self.max_num_seqs,
                pages_per_sequence=self.kv_plan.pages_per_sequence,
                num_groups=len(self.kv_plan.groups),
                media=self.media,
            )
            for bucket in buckets
        }

    @cached_property
    def media(self) -> MediaShape | None:
        """The shape of the media pool; None: the model sees nothing."""
        encoder, config = self.model.encoder, self.model.graph.config
        if encoder is None:
            return None
        return MediaShape(
            num_rows=min(MEDIA_ROWS, self.kv_plan.max_model_len),
            size=encoder.graph.spec.out,
            dtype=str(self.model.graph.activation_dtype),
            extra=len(encoder.graph.spec.tapped),
            axes=any(rope.axes is not None for rope in config.ropes),
            whole=encoder.graph.spec.bidirectional,
        )

    @property
    def largest(self) -> Bucket:
        """The bucket that holds every plan."""
        return max(self.layouts, key=Bucket.cost)

    def make_state(self) -> DeviceState:
        """A new state on the device."""
        draft_scales = None if self.draft_model is None else self.draft_model.kv_calibration
        state: DeviceState = self._state_program(self.model.kv_calibration, draft_scales)
        return state

    @cached_property
    def _state_program(self) -> Any:
        spec = ProgramSpec(
            function=make_device_state,
            arguments=self._state_arguments,
            device=self.platform.device,
            static=self._state_settings,
            sharding=self.platform.sharding,
            results=self.state_specs,
        )
        return self.cache.get(spec)

    @property
    def _state_arguments(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        scales = [None if model is None else model.kv_calibration for model in (self.model, self.draft_model)]
        return tuple(None if found is None else jax.ShapeDtypeStruct(found.shape, found.dtype) for found in scales)

    @property
    def _state_settings(self) -> dict[str, Any]:
        return {
            "config": self.model.graph.config,
            "vocab_size": self.model.config.vocab_size if self.has_head else 1,
            "plan": self.kv_plan,
            "num_slots": self.max_num_seqs,
            "as_bits": self.platform.is_cpu,
            "as_words": not self.platform.has_own_kernels,
            "draft": None if self.draft_model is None else self.draft_model.graph.config,
            "media": self.media,
        }

    @cached_property
    def state_specs(self) -> Any:
        """How the state lies on several devices, as a prefix of its tree."""
        sharding = self.platform.sharding
        if sharding is None:
            return PartitionSpec()
        shapes: DeviceState = jax.eval_shape(partial(make_device_state, **self._state_settings), *self._state_arguments)
        axes = tuple(stack.axes(self.model.graph.config.states) for stack in shapes.kv)
        kv: Any = jax.tree.map(sharding.spec, axes, is_leaf=lambda x: isinstance(x, Axes))
        pooled, media = (None if part is None else PartitionSpec() for part in (shapes.pooled, shapes.media))
        return DeviceState(kv=kv, rows=PartitionSpec(), sampler=PartitionSpec(), pooled=pooled, media=media)

    @cached_property
    def state_shapes(self) -> DeviceState:
        """The state as ``jax.ShapeDtypeStruct``s; nothing is allocated."""
        found, sharding = self._state_program.out_info, self.platform.sharding
        if sharding is None:
            whole: DeviceState = jax.tree.map(self._placed, found)
            return whole

        def placed(spec: PartitionSpec, part: Any) -> Any:
            place = NamedSharding(sharding.mesh, spec)
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), part)

        divided: DeviceState = jax.tree.map(placed, self.state_specs, found)
        return divided

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on each device, KV pages included."""
        shapes = jax.tree.leaves(self.state_shapes)
        return sum(prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize for shape in shapes)

    def options_of(self, bucket: Bucket) -> Mapping[str, str]:
        """XLA's options for a bucket's program."""
        of_prompt = not bucket.decode and bucket.tokens > GRAPH_TOKENS
        return self.options if self.prompt_options is None or not of_prompt else self.prompt_options

    def spec(self, bucket: Bucket) -> ProgramSpec:
        """The specification of a bucket's program."""
        layout, graph = self.layouts[bucket], self.model.graph
        packed = self._placed(jax.ShapeDtypeStruct((layout.size,), jnp.int32))
        before = None if graph.config.embeds else self._placed(self.hidden(bucket))
        static: dict[str, Any] = {"graph": graph, "names": self._names, "layout": layout}
        if self.is_staged:
            static["spans"] = tuple(group.span for group in self.kv_plan.groups)
        if self.has_head:
            static |= {"max_logprobs": self.max_logprobs, "draft": self._draft_graph}
        if bucket.adapters and self.model.adapters is not None:
            static["adapters"] = self.model.adapters.layout
        return ProgramSpec(
            function=step if self.has_head else pass_on,
            arguments=(
                self._adapted_shapes if bucket.adapters else self._weight_shapes,
                self.state_shapes,
                packed,
                *([] if before is None else [before]),
            ),
            device=self.platform.device,
            static=static,
            donated=(1,),
            options=self.options_of(bucket),
            sharding=self.platform.sharding,
            results=(self.state_specs, PartitionSpec()),
            choices=self.choices,
        )

    @property
    def is_staged(self) -> bool:
        """Whether the model is one of the stages of a larger one."""
        return not (self.model.graph.config.embeds and self.has_head)

    @property
    def has_head(self) -> bool:
        """Whether tokens are sampled here; else hidden states go to the next stage."""
        return self.model.graph.config.has_head

    def hidden(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the hidden states of a bucket's step [T, D]."""
        graph = self.model.graph
        return jax.ShapeDtypeStruct((bucket.tokens, graph.config.hidden_size), graph.activation_dtype)

    @property
    def head_weights(self) -> tuple[jax.Array, ...]:
        """The head's weights, as ``sample_masked`` takes them."""
        adapters, own = self.model.adapters, tuple(self.model.params[name] for name in self._head_names)
        return own if adapters is None else (*own, *adapters.layout.head_arrays(adapters.arrays))

    def masked_spec(self, bucket: Bucket) -> ProgramSpec:
        """The specification of the program that samples after that of a bucket, once the host has said which tokens are
        allowed. It depends on the bucket's rows and family alone."""
        model, rows = self.model, bucket.rows
        column = self._placed(jax.ShapeDtypeStruct((rows,), jnp.int32))
        hidden = jax.ShapeDtypeStruct((rows, model.graph.config.hidden_size), model.graph.activation_dtype)
        ends = Ends(hidden=self._placed(hidden), last_token=column, kv_len=column, slot=column, steps=column)
        mask = self._placed(jax.ShapeDtypeStruct((rows, mask_words(model.config.vocab_size)), jnp.int32))
        return ProgramSpec(
            function=sample_masked,
            arguments=(self._head_shapes, self._head_state, ends, mask),
            device=self.platform.device,
            static={
                "graph": model.graph.without_layers,
                "names": self._head_names,
                "decode": bucket.decode,
                "max_logprobs": self.max_logprobs,
                "adapters": None if model.adapters is None else model.adapters.layout.of_head,
            },
            donated=(1,),
            options=self.options,
            sharding=self.platform.sharding,
            choices=self.choices,
        )

    @property
    def encoder_weights(self) -> tuple[jax.Array, ...]:
        """The encoder's weights, as ``encode_part`` takes them; empty: there is none."""
        return () if self.model.encoder is None else tuple(self.model.encoder.params.values())

    def encoder_parts(self, patches: int) -> int:
        """In how many parts the encoder runs on a number of patches."""
        return len(self._encoder_layers(patches))

    def encoder_spec(self, bucket: Bucket) -> ProgramSpec:
        """The specification of the program of a part of the encoder, see `RunEncoder`."""
        places, batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_shapes(self._encoder.graph, bucket.tokens)
        )
        parts, part = self._encoder_layers(bucket.tokens), bucket.rows
        static, adapter, adapters = self._encoder_names, None, self._encoder.adapters
        if bucket.adapters and adapters is not None:
            static, adapter = {**static, "layout": adapters.layout}, jax.tree.map(self._placed, adapters.specs)
        layers, last, underway = parts[part], part == len(parts) - 1, None
        if part:
            begun = partial(encode_part, **static, first=0, end=layers.start)
            underway = jax.eval_shape(begun, self.encoder_weights, None, None, batch, None, adapter)
            batch = jax.eval_shape(without_patches, batch)
        placed = jax.tree.map(self._placed, (places, batch, underway))
        return ProgramSpec(
            function=encode_part,
            arguments=(
                _shapes(self.encoder_weights),
                self.state_shapes.media if last else None,
                placed[0] if last else None,
                *placed[1:],
                adapter,
            ),
            device=self.platform.device,
            static={**static, "first": layers.start, "end": layers.stop},
            donated=(1,) if last else (4,) if part else (),
            options=self.options,
            sharding=self.platform.sharding,
            choices=self.choices,
        )

    @property
    def _encoder(self) -> LoadedEncoder:
        assert self.model.encoder is not None
        return self.model.encoder

    @property
    def _encoder_names(self) -> dict[str, Any]:
        return {"graph": self._encoder.graph, "names": tuple(self._encoder.params)}

    def _encoder_layers(self, patches: int) -> list[range]:
        return parts_of(self._encoder.graph.spec, patches, products=PART_PRODUCTS[self.platform.is_cpu])

    # One object each for all buckets: their digests are worked out once.

    @cached_property
    def _weight_shapes(self) -> Any:
        return _shapes(self.weights)

    @cached_property
    def _adapted_shapes(self) -> Any:
        return _shapes(self.adapted_weights)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.model.params)

    @cached_property
    def _head_shapes(self) -> Any:
        return _shapes(self.head_weights)

    @cached_property
    def _head_state(self) -> DeviceState:
        return self.state_shapes.without_layers

    @cached_property
    def _head_names(self) -> tuple[str, ...]:
        kept = frozenset(self.model.graph.without_layers.names)
        return tuple(name for name in self.model.params if name in kept)

    def keeps(self, bucket: Bucket) -> bool:
        """Whether the program of a bucket needs only to be read."""
        return self.cache.has(self.spec(bucket))

    def compile(self, bucket: Bucket) -> Executable:
        """The program of a bucket: ``(weights, state, packed) -> (state, StepOutput)``."""
        return self.cache.get(self.spec(bucket))

    def compile_masked(self, bucket: Bucket) -> Executable:
        """The program that samples after that of a bucket: ``(head weights, state, Ends, mask) -> (state, Sampled)``,
        with a state that has nothing of the layers."""
        return self.cache.get(self.masked_spec(bucket))

    def compile_encoder(self, bucket: Bucket) -> Executable:
        """The program of a part of the encoder; arguments and result as those of ``encode_part``."""
        return self.cache.get(self.encoder_spec(bucket))

    def bytes_beside_kv(self) -> int:
        """Bytes of the device's memory that steps take beside weights and KV pages; compiles the largest program.

        Temporaries do not depend on the number of pages, but for a step in XLA's plan between few and many.

        Raises:
            CompileError: XLA refuses it.
            ConfigError: this device's compiler does not say.
        """

        # Here alone: others compile it when all have said how many pages they have room for.
        def measure() -> ProgramMemory | None:
            return ProgramMemory.of(build_one(lambda bucket: self.cache.get(self.spec(bucket)), self.largest))

        largest = self.cache.found_of(lambda: [self.spec(self.largest)], "memory", measure)
        if largest is None:
            raise ConfigError(
                f"the compiler of {self.platform.device} does not say how much memory steps take; set "
                "kv_cache_memory_bytes"
            )
        return largest.total + self.state_bytes - self.kv_plan.num_bytes

    def _placed(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self.platform.everywhere)


def _shapes(weights: tuple[jax.Array, ...]) -> Any:
    """Weights keep their own places: some may lie in the host's memory."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights)


def build_one(build: Callable[[Bucket], Executable], bucket: Bucket) -> Executable:
    """``build(bucket)``.

    Raises:
        CompileError: XLA refuses the program.
    """
    try:
        return build(bucket)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CompileError(f"the step program of {bucket} does not compile: {cause}") from error
