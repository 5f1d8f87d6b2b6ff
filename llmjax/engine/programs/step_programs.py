"""Step programs: what the one of each bucket is compiled from, and the compiled ones, used as soon as one that fits is
ready."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from llmjax.engine.core.scheduler import StepPlan
from llmjax.engine.device.batch import BatchLayout, Bucket, make_buckets
from llmjax.engine.device.device_state import DeviceState, Ends
from llmjax.engine.device.rows import make_row_state
from llmjax.engine.device.step import pass_on, sample_masked, step
from llmjax.engine.drafts.proposal import DraftGraph
from llmjax.engine.loading.memory import KVPlan, ProgramMemory
from llmjax.engine.loading.model import LoadedModel
from llmjax.engine.lull import Lull
from llmjax.engine.programs.cache import Executable, ProgramCache, ProgramSpec
from llmjax.engine.programs.threads import CompileThreads
from llmjax.engine.ranks.group import Alone
from llmjax.errors import CompileError, ConfigError
from llmjax.host_memory import give_back
from llmjax.kernels.sharding import Axes
from llmjax.models.config import ModelConfig
from llmjax.models.layers.state import make_stacks
from llmjax.platforms import Platform
from llmjax.sampling.masks import mask_words
from llmjax.sampling.state import make_sampler_state

logger = logging.getLogger(__name__)

T = TypeVar("T")
EMPTY: Mapping[Any, Any] = MappingProxyType({})


def new_state(
    scales: jax.Array | None,
    draft_scales: jax.Array | None = None,
    *,
    config: ModelConfig,
    vocab_size: int,
    plan: KVPlan,
    num_slots: int,
    as_bits: bool,
    as_words: bool,
    draft: ModelConfig | None = None,
) -> DeviceState:
    """No key, no token, nothing seen.

    Args:
        scales, draft_scales: `LoadedModel.kv_calibration` of the model, and of the draft model.
        config: of the model that a device runs.
        vocab_size: of the whole model.
        as_bits, as_words: as in ``llmjax.kernels.attention.make_pages``.
        draft: the draft model, if there is one.
    """
    stacks = partial(
        make_stacks,
        num_pages={group.span: group.num_pages for group in plan.groups},
        page_size=plan.page_size,
        dtype=plan.layout.dtype,
        as_bits=as_bits,
        as_words=as_words,
    )
    kv = stacks(config.states, calibration=scales)
    draft_kv = () if draft is None else stacks(draft.states, calibration=draft_scales)
    # A model that makes vectors samples nothing.
    sampler = make_sampler_state(num_slots=num_slots, vocab_size=1 if config.pooler is not None else vocab_size)
    rows = make_row_state(num_slots=num_slots, num_groups=len(plan.groups), pages_per_sequence=plan.pages_per_sequence)
    pooled = None if config.pooler is None else jnp.zeros((num_slots, config.hidden_size), jnp.float32)
    return DeviceState(kv=kv, draft_kv=draft_kv, rows=rows, sampler=sampler, pooled=pooled)


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
        drafts: of the next tokens of a row, that a step may verify.
        drafted_rows: rows of a step with drafts, at most.
        draft_model: that makes them; None: the host does.
        options: XLA's compiler options.
        cache: where programs are kept from start to start.
        group: the processes that run the model.
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
    cache: ProgramCache = field(default_factory=ProgramCache)
    group: Alone = field(default_factory=Alone)

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """As ``step`` takes them."""
        drafts = () if self.draft_model is None else self.draft_model.params.values()
        return (*self.model.params.values(), *drafts)

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
        )
        return {
            bucket: BatchLayout(
                bucket=bucket,
                num_slots=self.max_num_seqs,
                pages_per_sequence=self.kv_plan.pages_per_sequence,
                num_groups=len(self.kv_plan.groups),
            )
            for bucket in buckets
        }

    @property
    def largest(self) -> Bucket:
        """The bucket that holds every plan."""
        return max(self.layouts, key=_cost)

    def make_state(self) -> DeviceState:
        """A new state on the device."""
        draft_scales = None if self.draft_model is None else self.draft_model.kv_calibration
        state: DeviceState = self._state_program(self.model.kv_calibration, draft_scales)
        return state

    @cached_property
    def _state_program(self) -> Any:
        spec = ProgramSpec(
            function=new_state,
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
        }

    @cached_property
    def state_specs(self) -> Any:
        """How the state lies on several devices, as a prefix of its tree."""
        sharding = self.platform.sharding
        if sharding is None:
            return PartitionSpec()
        shapes: DeviceState = jax.eval_shape(partial(new_state, **self._state_settings), *self._state_arguments)
        axes = tuple(stack.axes(self.model.graph.config.states) for stack in shapes.kv)
        kv: Any = jax.tree.map(sharding.spec, axes, is_leaf=lambda x: isinstance(x, Axes))
        pooled = None if shapes.pooled is None else PartitionSpec()
        return DeviceState(kv=kv, rows=PartitionSpec(), sampler=PartitionSpec(), pooled=pooled)

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
        """Of the state on each device, KV pages included."""
        shapes = jax.tree.leaves(self.state_shapes)
        return sum(prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize for shape in shapes)

    def spec(self, bucket: Bucket) -> ProgramSpec:
        """What the program of a bucket is compiled from."""
        layout, graph = self.layouts[bucket], self.model.graph
        packed = self._placed(jax.ShapeDtypeStruct((layout.size,), jnp.int32))
        before = None if graph.config.embeds else self._placed(self.hidden(bucket))
        static: dict[str, Any] = {"graph": graph, "names": self._names, "layout": layout}
        if self.is_staged:
            static["spans"] = tuple(group.span for group in self.kv_plan.groups)
        if self.has_head:
            static |= {"max_logprobs": self.max_logprobs, "draft": self._draft_graph}
        return ProgramSpec(
            function=step if self.has_head else pass_on,
            arguments=(self._weight_shapes, self.state_shapes, packed, *([] if before is None else [before])),
            device=self.platform.device,
            static=static,
            donated=(1,),
            options=self.options,
            sharding=self.platform.sharding,
            results=(self.state_specs, PartitionSpec()),
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
        """What a stage makes of the tokens of a bucket's step for the next one, [T, D]."""
        graph = self.model.graph
        return jax.ShapeDtypeStruct((bucket.tokens, graph.config.hidden_size), graph.activation_dtype)

    @property
    def head_weights(self) -> tuple[jax.Array, ...]:
        """As ``sample_masked`` takes them."""
        return tuple(self.model.params[name] for name in self._head_names)

    def masked_spec(self, bucket: Bucket) -> ProgramSpec:
        """What samples behind the program of a bucket, where the host has to say which tokens are allowed, is compiled
        from. It looks at the bucket's rows and family alone."""
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
            },
            donated=(1,),
            options=self.options,
            sharding=self.platform.sharding,
        )

    # One object each for all buckets: their digests are worked out once.

    @cached_property
    def _weight_shapes(self) -> Any:
        return _shapes(self.weights)

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
        return self.group.everywhere("step", bucket, lambda: self.cache.get(self.spec(bucket)))

    def compile_masked(self, bucket: Bucket) -> Executable:
        """What samples behind that of a bucket: ``(head weights, state, Ends, mask) -> (state, Sampled)``, without
        what layers keep."""
        if self.is_staged:  # no other stage samples
            return self.cache.get(self.masked_spec(bucket))
        return self.group.everywhere("masked", bucket, lambda: self.cache.get(self.masked_spec(bucket)))

    def bytes_beside_kv(self) -> int:
        """What steps take of the device's memory beside weights and KV pages; the largest program is compiled to know.

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


@dataclass(frozen=True)
class Program:
    """The compiled step of one bucket."""

    bucket: Bucket
    executable: Executable
    seconds: float  # that lowering and compiling (or reading the cache) took


class CompileCounter:
    """Counts programs that XLA compiled or read from the cache, in the whole process."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        self._closed = False
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event == self.EVENT:
            with self._lock:
                self.count += 1

    def close(self) -> None:
        """Stops counting; a second call does nothing."""
        if not self._closed:
            self._closed = True
            jax.monitoring.unregister_event_duration_listener(self._listen)


class StepPrograms:
    """All buckets of one model.

    Programs that are kept on disk are read when a plan wants them, or while nobody computes anything: reading takes a
    core and the interpreter for a tenth of a second each, which running requests would wait for. Only the two that one
    short request needs are read at once, beside what else a start has to do.

    Args:
        build: compiles or reads the program of one bucket; may be called by several threads.
        buckets: any order; the last mixed one must hold every plan.
        threads: where they are compiled.
        kept: those whose programs need only to be read.
        apart: those that another process compiles, each done when its program needs only to be read, or never will; not
            the largest one.
        lull: when nobody computes anything.
    """

    def __init__(
        self,
        build: Callable[[Bucket], Executable],
        buckets: list[Bucket],
        *,
        threads: CompileThreads,
        kept: Collection[Bucket] = (),
        apart: Mapping[Bucket, Future[None]] = EMPTY,
        lull: Lull | None = None,
    ) -> None:
        self._build = build
        self._order = sorted(buckets, key=_cost)
        self._kept = set(kept)
        self._programs: dict[Bucket, Program] = {}
        self._building = {bucket: threading.Lock() for bucket in buckets}
        self._lull = lull or Lull()
        cheapest = {bucket.decode: bucket for bucket in reversed(self._order) if not bucket.drafts}
        self._at_once = self._kept.intersection(cheapest.values())
        # Those that wait come last.
        order = sorted(in_turn(buckets), key=lambda b: b in self._kept and b not in self._at_once)
        self._largest: Future[Program] = Future()  # which the others look at, whoever comes first
        self._futures = [self._submit(bucket, threads, apart.get(bucket)) for bucket in order]
        follow(self._futures[order.index(self._order[-1])], self._largest)

    @property
    def buckets(self) -> list[Bucket]:
        """All of them, cheapest first."""
        return self._order

    @property
    def ready(self) -> list[Program]:
        """The programs compiled or read so far, cheapest first."""
        return [program for bucket in self._order if (program := self._programs.get(bucket)) is not None]

    def wait_first(self) -> None:
        """Returns when every plan can be run.

        Raises:
            CompileError: no plan can, for the largest bucket does not compile.
        """
        if self._order[-1] not in self._kept:
            self._largest.result()

    def wait_all(self) -> None:
        """Returns when nothing is left to compile or to read; raises as `wait_first`."""
        self._lull.end()
        self._largest.result()
        for future in self._futures:
            future.exception()

    def pick(self, plan: StepPlan, *, usable: Callable[[Bucket], bool] = lambda bucket: True) -> Program:
        """The cheapest program that holds the plan, of those that are ready or need only to be read.

        Args:
            usable: whether a bucket can be taken; the largest one always is.
        """
        self._lull.step()
        for bucket in self._order:
            if bucket.holds(plan) and usable(bucket) and (program := self._at_hand(bucket)) is not None:
                return program
        return self._largest.result()

    def most_steps(self, rows: int) -> int:
        """Decode steps that one dispatch of so many rows may take with the programs that there are."""
        there = (bucket for bucket in self._order if bucket in self._programs or bucket in self._kept)
        return max((bucket.steps for bucket in there if bucket.rows >= rows), default=1)

    def most_drafts(self, rows: int) -> int:
        """Drafts that each of so many rows may have with the programs that there are."""
        there = (bucket for bucket in self._order if bucket in self._programs or bucket in self._kept)
        return max((bucket.drafts for bucket in there if bucket.rows >= rows), default=0)

    def _at_hand(self, bucket: Bucket) -> Program | None:
        program = self._programs.get(bucket)
        if program is None and bucket in self._kept:
            try:
                program = self._compile(bucket)
            except CompileError as error:
                self._kept.discard(bucket)
                logger.warning("%s; a larger one takes its place", error)
        return program

    def _compile(self, bucket: Bucket) -> Program:
        """Once, whoever asks."""
        with self._building[bucket]:
            if (there := self._programs.get(bucket)) is not None:
                return there
            started = time.monotonic()
            executable = build_one(self._build, bucket)
            program = Program(bucket=bucket, executable=executable, seconds=time.monotonic() - started)
            logger.debug("compiled %s in %.1f s", bucket, program.seconds)
            self._programs[bucket] = program
        if bucket not in self._kept:
            give_back()
        return program

    def _submit(self, bucket: Bucket, threads: CompileThreads, kept: Future[None] | None) -> Future[Program]:
        """Has it compiled or read, when it is kept or nobody else compiles it."""
        if kept is None:
            return threads.submit(self._compile_in_turn, bucket)
        program: Future[Program] = Future()

        def begin(kept: Future[None]) -> None:
            if kept.cancelled():
                program.cancel()
                return
            if kept.exception() is None:
                self._kept.add(bucket)
            follow(threads.submit(self._compile_in_turn, bucket), program)

        kept.add_done_callback(begin)
        return program

    def _compile_in_turn(self, bucket: Bucket) -> Program:
        if bucket in self._kept and bucket not in self._at_once:
            self._lull.wait()
        if bucket == self._order[-1]:
            return self._compile(bucket)
        if self._largest.done():
            self._largest.result()  # its error is this one's too
        try:
            return self._compile(bucket)
        except CompileError as error:
            # If the largest one, which threads took before this one, fails too, nobody should read of any other. One
            # that is kept comes after this one, and is not waited for.
            if self._order[-1] in self._kept or self._largest.exception() is None:
                logger.warning("%s; a larger one takes its place", error)
                logger.debug("why:", exc_info=error)
            raise


def in_turn(buckets: Collection[Bucket]) -> list[Bucket]:
    """The order to compile in: the largest bucket holds every plan, so the engine can serve as soon as it is there;
    then one decode and the largest decode bucket; the rest from small to large."""
    *smaller, largest = sorted(buckets, key=_cost)
    decode = [bucket for bucket in smaller if bucket.decode]
    return list(dict.fromkeys([largest, *decode[:1], *decode[-1:], *smaller]))


def follow(first: Future[T], second: Future[T]) -> None:
    """The second one ends as the first one does."""

    def end(first: Future[T]) -> None:
        if first.cancelled():
            second.cancel()
        elif (error := first.exception()) is not None:
            second.set_exception(error)
        else:
            second.set_result(first.result())

    first.add_done_callback(end)


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


def _cost(bucket: Bucket) -> tuple[int, bool, bool]:
    """Decode before mixed at equal size; the largest mixed bucket last."""
    return (bucket.tokens, not bucket.decode, not bucket.drafts)
