"""What step programs are compiled from: the shapes of weights and state, the buckets, and what XLA is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import jax
import jax.numpy as jnp

from llmjax.engine.batch import BatchLayout, Bucket, make_buckets
from llmjax.engine.memory import KVPlan, ProgramMemory
from llmjax.engine.model import LoadedModel
from llmjax.engine.programs import Executable, build_one
from llmjax.engine.step import DeviceState, step
from llmjax.errors import ConfigError
from llmjax.platforms import Platform
from llmjax.sampling.state import make_sampler_state


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
        options: XLA's compiler options.
    """

    model: LoadedModel
    platform: Platform
    kv_plan: KVPlan
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    decode_steps: int = 1
    options: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def weights(self) -> tuple[jax.Array, ...]:
        """As ``step`` takes them."""
        return tuple(self.model.params.values())

    @cached_property
    def layouts(self) -> dict[Bucket, BatchLayout]:
        """All buckets, and how their batches are packed."""
        buckets = make_buckets(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            decode_steps=self.decode_steps,
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
        return max((bucket for bucket in self.layouts if not bucket.decode), key=lambda bucket: bucket.tokens)

    def make_state(self) -> DeviceState:
        """A new state on the device: no key, no token, nothing seen."""
        config, plan, scales = self.model.config, self.kv_plan, self.model.kv_calibration
        with jax.default_device(self.platform.device):
            kv = tuple(
                spec.mixer.state.make(
                    num_pages=plan.groups[config.group_of(layer)].num_pages,
                    page_size=plan.page_size,
                    dtype=plan.layout.dtype,
                    as_bits=self.platform.is_cpu,
                    calibration=None if scales is None else jnp.asarray(scales[layer]),
                )
                for layer, spec in enumerate(config.layers)
            )
            sampler = make_sampler_state(num_slots=self.max_num_seqs, vocab_size=config.vocab_size)
            return DeviceState(kv=kv, last_token=jnp.zeros(self.max_num_seqs, jnp.int32), sampler=sampler)

    @cached_property
    def state_shapes(self) -> DeviceState:
        """The state as ``jax.ShapeDtypeStruct``s; nothing is allocated."""
        shapes: DeviceState = jax.tree.map(self._placed, jax.eval_shape(self.make_state))
        return shapes

    @property
    def state_bytes(self) -> int:
        """Of the state, KV pages included."""
        return sum(shape.size * shape.dtype.itemsize for shape in jax.tree.leaves(self.state_shapes))

    def compile(self, bucket: Bucket) -> Executable:
        """The program of a bucket: ``(weights, state, packed) -> (state, StepOutput)``."""
        layout = self.layouts[bucket]
        run = partial(
            step,
            graph=self.model.graph,
            names=tuple(self.model.params),
            layout=layout,
            max_logprobs=self.max_logprobs,
        )
        # Weights keep their own places: some may lie in the host's memory.
        weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.weights)
        packed = self._placed(jax.ShapeDtypeStruct((layout.size,), jnp.int32))
        # Kernels look at the default device while they are lowered (`llmjax.kernels.cuda.tuned`).
        with jax.default_device(self.platform.device):
            lowered = jax.jit(run, donate_argnums=1).lower(weights, self.state_shapes, packed)
        return lowered.compile(compiler_options=dict(self.options))

    def bytes_beside_kv(self) -> int:
        """What steps take of the device's memory beside weights and KV pages; the largest program is compiled to know.

        Temporaries do not depend on the number of pages, but for a step in XLA's plan between few and many.

        Raises:
            CompileError: XLA refuses it.
            ConfigError: this device's compiler does not say.
        """
        largest = ProgramMemory.of(build_one(self.compile, self.largest))
        if largest is None:
            raise ConfigError(
                f"the compiler of {self.platform.device} does not say how much memory steps take; set "
                "kv_cache_memory_bytes"
            )
        return largest.total + self.state_bytes - self.kv_plan.num_bytes

    def _placed(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.SingleDeviceSharding(self.platform.device)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
