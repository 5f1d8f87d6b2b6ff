"""Experts that lie in the host's memory: a step fetches those that its tokens chose, one at a time.

So a mixture of experts larger than a card runs on it. A fetch is a slice of pinned host memory that XLA copies inside
the program (on CUDA a kernel that reads over the bus), so the host is not asked, and only experts in use are moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from llmjax.kernels.adapted import Adapted, as_it_is
from llmjax.kernels.adapted_experts import adapted_experts
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.experts import experts
from llmjax.kernels.qtensor import QTensor

HOST_MEMORY = "pinned_host"  # the kind of memory, as JAX names it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitStack:
    """The matrices of E experts, [E, out, in], of which the last N lie in the host's memory."""

    resident: jax.Array | QTensor  # [E - N, out, in]
    offloaded: jax.Array | QTensor  # [N, out, in]; plain numbers as unsigned integers of their size

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.resident.shape[0] + self.offloaded.shape[0], *self.resident.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.resident.nbytes + self.offloaded.nbytes

    def fetch(self, index: jax.Array) -> jax.Array | QTensor:
        """Number ``index`` (i32 []) of the offloaded matrices, on the device, [1, out, in]."""

        def bring(leaf: jax.Array) -> jax.Array:
            one = jax.lax.dynamic_index_in_dim(leaf, index, axis=0)
            return jax.device_put(one, jax.memory.Space.Device)

        one = jax.tree.map(bring, self.offloaded)
        return one if isinstance(one, QTensor) else jax.lax.bitcast_convert_type(one, self.resident.dtype)


def experts_anywhere(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> jax.Array:
    """``llmjax.kernels.experts.experts``, with weights that may be `SplitStack`s and have adapters."""
    here = adapted_experts if isinstance(weights.gate.weight, Adapted) else experts
    first: SplitStack | jax.Array | QTensor = as_it_is(weights.gate.weight)
    if not isinstance(first, SplitStack):
        return here(x, chosen, shares, weights, activation=activation)
    count, offloaded = first.shape[0], first.offloaded.shape[0]
    resident = count - offloaded
    is_resident = chosen < resident
    wide = x.astype(jnp.float32)  # so that sums of both are rounded once
    out = here(
        wide,
        jnp.where(is_resident, chosen, 0),
        jnp.where(is_resident, shares, 0),
        _each(weights, lambda stack: stack.resident, lambda bias: bias[:resident], lambda part: part),
        activation=activation,
    )
    # f32 [N, T]: what each token wants of each offloaded expert.
    number = jnp.arange(resident, count)
    wanted = jnp.sum(jnp.where(chosen == number[:, None, None], shares, 0), axis=-1)
    used = jnp.any(wanted != 0, axis=-1)
    order = jnp.argsort(~used)  # those in use come first

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        index = order[i]
        own = resident + index
        one = _each(
            weights,
            lambda stack: stack.fetch(index),
            lambda bias: bias[own][None],
            lambda part: jax.lax.dynamic_slice_in_dim(part, own, 1, axis=1),
        )
        share = wanted[index][:, None]
        return total + here(wide, jnp.zeros_like(share, jnp.int32), share, one, activation=activation)

    return jax.lax.fori_loop(0, jnp.sum(used), add, out).astype(x.dtype)


def _each(
    weights: ExpertWeights,
    of_stack: Callable[[SplitStack], jax.Array | QTensor],
    of_bias: Callable[[jax.Array], jax.Array],
    of_adapters: Callable[[jax.Array], jax.Array],
) -> ExpertWeights:
    """Weights of some of the experts.

    Args:
        of_adapters: takes their part of what adapters change, [S, E, r, size], or all of it if numbers stay the same.
    """

    def some(projection: Projection) -> Projection:
        whole, bias = projection.weight, projection.bias
        stack: SplitStack | jax.Array | QTensor = as_it_is(whole)
        assert isinstance(stack, SplitStack)
        weight: jax.Array | QTensor | Adapted = of_stack(stack)
        if isinstance(whole, Adapted) and (delta := whole.delta) is not None:
            delta = replace(delta, a=of_adapters(delta.a), b=of_adapters(delta.b))
            weight = replace(whole, weight=weight, delta=delta)
        return Projection(weight, None if bias is None else of_bias(bias))

    return ExpertWeights(some(weights.gate), some(weights.up), some(weights.down))
