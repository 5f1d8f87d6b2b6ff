"""The residual stream: ``x + after(part(before(x)))`` for each sublayer.

A part either mixes tokens, ``part(n, context) -> (out, state)``, or takes each token by itself, ``part(n, context) ->
out``. This is the portable implementation. Parts with kernels that fuse the whole sublayer list them in ``sublayer``.

Where ``part.divided`` is divided over devices, each device has a part of the columns of the last projection: a sublayer
is then the projection (``part.partial``), the sum over devices, and `added`.
"""

from __future__ import annotations

from typing import Protocol

import jax

from llmjax.kernels.registry import Operation
from llmjax.kernels.sharding import all_sum, parts
from llmjax.models.layers.context import Context
from llmjax.models.layers.state import LayerState
from llmjax.models.modules.norm import NormModule, is_fused


class Sublayer(Protocol):
    """What the modules of mixers and of feed-forward parts have in common."""

    @property
    def sublayer(self) -> Operation:
        """`mixed` or `fed_forward`, by whatever kernels there are for them."""

    @property
    def divided(self) -> str:
        """The logical axis along which devices divide the columns of the last projection."""

    @property
    def last_bias(self) -> jax.Array | None:
        """The bias of the last projection, [D]."""


class MixerModule(Sublayer, Protocol):
    """A module that mixes tokens, [T, D] to [T, D], and gives the state that is kept of them."""

    def __call__(self, n: jax.Array, context: Context) -> tuple[jax.Array, LayerState]: ...

    def partial(self, n: jax.Array, context: Context) -> tuple[jax.Array, LayerState]:
        """The same without ``last_bias``, to be summed over devices."""


class FeedForwardModule(Sublayer, Protocol):
    """A module that takes each token by itself, [T, D] to [T, D]."""

    def __call__(self, n: jax.Array, context: Context) -> jax.Array: ...

    def partial(self, n: jax.Array, context: Context) -> jax.Array:
        """The same without ``last_bias``, to be summed over devices."""


def mixed(
    x: jax.Array,
    mixer: MixerModule,
    before: NormModule | None,
    after: NormModule | None,
    context: Context,
    *,
    residual: bool = True,
) -> tuple[jax.Array, LayerState]:
    """``x + after(mixer(before(x)))``, and the state of the mixer.

    Args:
        x: [T, D].
        before, after: norms; None: no norm.
        residual: False: only the mixer's last projection, without its bias, ``after`` and x, for `added`.
    """
    n = normed(x, before)
    if not residual:
        return mixer.partial(n, context)
    out, state = mixer(n, context)
    return x + normed(out, after), state


def fed_forward(
    x: jax.Array,
    feed_forward: FeedForwardModule,
    before: NormModule | None,
    after: NormModule | None,
    context: Context,
    *,
    residual: bool = True,
) -> jax.Array:
    """``x + after(feed_forward(before(x)))``; arguments as for `mixed`."""
    n = normed(x, before)
    if not residual:
        return feed_forward.partial(n, context)
    return x + normed(feed_forward(n, context), after)


def add_mixed(
    x: jax.Array,
    mixer: MixerModule,
    before: NormModule | None,
    after: NormModule | None,
    context: Context,
    *,
    scale: float = 1.0,
) -> tuple[jax.Array, LayerState]:
    """`mixed` by a kernel that fuses it; else, or with a sum over devices, the projection and then `added`.

    Args:
        scale: factor of what is added to x.
    """
    if parts(mixer.divided) == 1 and is_fused(before) and is_fused(after) and scale == 1:
        whole: tuple[jax.Array, LayerState] = mixer.sublayer(x, mixer, before, after, context)
        return whole
    n, before = (x, before) if is_fused(before) else (normed(x, before), None)
    product, state = mixer.sublayer(n, mixer, before, None, context, residual=False)
    return added(x, all_sum(product, mixer.divided), mixer.last_bias, after, scale=scale), state


def add_fed_forward(
    x: jax.Array,
    part: FeedForwardModule,
    before: NormModule | None,
    after: NormModule | None,
    context: Context,
    *,
    scale: float = 1.0,
) -> jax.Array:
    """`fed_forward` by a kernel that fuses it; see `add_mixed`."""
    if parts(part.divided) == 1 and is_fused(before) and is_fused(after) and scale == 1:
        whole: jax.Array = part.sublayer(x, part, before, after, context)
        return whole
    n, before = (x, before) if is_fused(before) else (normed(x, before), None)
    product = part.sublayer(n, part, before, None, context, residual=False)
    return added(x, all_sum(product, part.divided), part.last_bias, after, scale=scale)


def add_both(
    x: jax.Array,
    mixer: MixerModule,
    part: FeedForwardModule,
    before_mixer: NormModule | None,
    before: NormModule | None,
    context: Context,
    *,
    scale: float = 1.0,
) -> tuple[jax.Array, LayerState]:
    """``x + mixer(before_mixer(x)) + part(before(x))``, and the state of the mixer.

    Args:
        before: norm of the part's input; None: the mixer's norm.
        scale: factor of both outputs.
    """
    n = normed(x, before_mixer)
    m = n if before is None else before(x)
    mixed_product, state = mixer.sublayer(n, mixer, None, None, context, residual=False)
    fed_product = part.sublayer(m, part, None, None, context, residual=False)
    x = added(x, all_sum(mixed_product, mixer.divided), mixer.last_bias, None, scale=scale)
    return added(x, all_sum(fed_product, part.divided), part.last_bias, None, scale=scale), state


def added(
    x: jax.Array, product: jax.Array, bias: jax.Array | None, after: NormModule | None, *, scale: float = 1.0
) -> jax.Array:
    """``x + scale * after(product + bias)``: what follows in a sublayer after its product is summed over devices."""
    out = normed(product if bias is None else product + bias.astype(product.dtype), after)
    return x + (out if scale == 1 else scale * out)


def normed(x: jax.Array, norm: NormModule | None) -> jax.Array:
    """``norm(x)``, or x if there is no norm."""
    return x if norm is None else norm(x)
