"""The encoder of pictures that all families share; attribute paths are the names of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.attention.segments import attend_segments
from llmjax.kernels.registry import traced_platform
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.mlp import InnerModule, MLPModule, gated_mlp_module
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import normed
from llmjax.models.vision.batch import PatchBatch
from llmjax.models.vision.perceiver import Perceiver
from llmjax.models.vision.probe import Probe
from llmjax.models.vision.resampler import Resampler
from llmjax.models.vision.rotation import turn
from llmjax.models.vision.spec import (
    Fed,
    Halved,
    Joined,
    Merged,
    Normed,
    Perceiving,
    Probing,
    Projected,
    Rope2D,
    Shared,
    Standardized,
    Step,
    VisionAttention,
    VisionLayer,
    VisionSpec,
)
from llmjax.models.vision.windows import WindowPooling

FEW = 8
"""Sources of a row that are added at once."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Encoded:
    """What an encoder makes of a batch.

    Attributes:
        rows: [N, D], feature rows; those of padding are anything.
        tapped: [K, N, D], rows made of earlier layers' outputs (deepstack), K may be 0.
    """

    rows: jax.Array
    tapped: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Underway:
    """A batch between two layers.

    Attributes:
        x: [P, W], the patches' vectors, with those of class tokens.
        tapped: [N, D] each, what has been made of the outputs of layers in ``tapped``.
        beside: [P, W] each, the outputs of layers in ``beside``, those of earlier layers first.
    """

    x: jax.Array
    tapped: tuple[jax.Array, ...] = ()
    beside: tuple[jax.Array, ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What each patch sees: see the arguments of ``attend_segments``."""

    segments: jax.Array
    tile: int | None = field(default=None, metadata={"static": True})
    reach: int | None = field(default=None, metadata={"static": True})


class ClippedLinear(Linear):
    """`Linear` whose input and output are kept between bounds."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool, dtype: jnp.dtype) -> None:
        super().__init__(size_in, size_out, bias=bias, dtype=dtype)
        for name in ("input_min", "input_max", "output_min", "output_max"):
            setattr(self, name, parameter((), jnp.float32, axes=()))

    def __call__(self, x: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """See `Linear`."""
        out = super().__call__(_between(x, self.input_min, self.input_max), used)
        return _between(out, self.output_min, self.output_max)


def _between(x: jax.Array, least: nnx.Param, most: nnx.Param) -> jax.Array:
    return jnp.clip(x, least.get_value().astype(x.dtype), most.get_value().astype(x.dtype))


class Attention(nnx.Module):
    """Attention of patches to those of equal segment."""

    def __init__(
        self, spec: VisionAttention, size: int, rope: Rope2D | None, *, dtype: jnp.dtype, clipped: bool = False
    ) -> None:
        self.spec, self.rope = spec, rope
        self.narrow = jnp.dtype(dtype) == jnp.bfloat16
        inner, matrix = spec.heads * spec.head_dim, ClippedLinear if clipped else Linear
        self.q_proj = matrix(size, inner, bias=spec.bias, dtype=dtype)
        self.k_proj = matrix(size, inner, bias=spec.bias, dtype=dtype)
        self.v_proj = matrix(size, inner, bias=spec.bias, dtype=dtype)
        self.o_proj = matrix(inner, size, bias=spec.out_bias, dtype=dtype)
        of_qk = (spec.qk_norm, spec.head_dim) if spec.whole_norm is None else (spec.whole_norm, inner)
        self.q_norm = None if of_qk[0] is None else build_norm(of_qk[0], of_qk[1])
        self.k_norm = None if of_qk[0] is None else build_norm(of_qk[0], of_qk[1])
        self.v_norm = None if spec.v_norm is None else build_norm(spec.v_norm, spec.head_dim)

    def __call__(self, x: jax.Array, seen: Seen, angles: jax.Array | None) -> jax.Array:
        """[P, W] to [P, W]; ``angles`` f32 [P, head_dim / 2]."""
        spec = self.spec
        shape = (len(x), spec.heads, spec.head_dim)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x).reshape(shape)
        if spec.whole_norm is not None:
            q, k = normed(q, self.q_norm), normed(k, self.k_norm)
        q, k = q.reshape(shape), k.reshape(shape)
        if spec.whole_norm is None:
            q, k = normed(q, self.q_norm), normed(k, self.k_norm)
        v = normed(v, self.v_norm)
        if angles is not None:
            assert self.rope is not None
            q, k = turn(q, angles, self.rope.pairs), turn(k, angles, self.rope.pairs)
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        # The matrices' type: hardware that multiplies it is faster at scores too.
        dtype = jnp.bfloat16 if self.narrow else None
        attended = attend_segments(q, k, v, seen.segments, scale=scale, dtype=dtype, tile=seen.tile, reach=seen.reach)
        return self.o_proj(attended.reshape(len(x), -1))


class Layer(nnx.Module):
    """One layer; see `VisionLayer`."""

    def __init__(self, spec: VisionLayer, size: int, rope: Rope2D | None, *, dtype: jnp.dtype) -> None:
        self.norm1 = build_norm(spec.norm, size)
        self.attn = Attention(spec.attention, size, rope, dtype=dtype, clipped=spec.clipped)
        self.after1 = None if spec.after is None else build_norm(spec.after, size)
        self.norm2 = build_norm(spec.norm, size)
        self.mlp = _fed(spec.feed_forward, size, dtype, clipped=spec.clipped)
        self.after2 = None if spec.after is None else build_norm(spec.after, size)
        self.scale1 = parameter((size,), jnp.float32, axes=(None,)) if spec.scaled else None
        self.scale2 = parameter((size,), jnp.float32, axes=(None,)) if spec.scaled else None

    def __call__(self, x: jax.Array, seen: Seen, angles: jax.Array | None) -> jax.Array:
        mixed = normed(self.attn(self.norm1(x), seen, angles), self.after1)
        x = x + _scaled(mixed, self.scale1)
        fed = normed(self.mlp(self.norm2(x)), self.after2)
        return x + _scaled(fed, self.scale2)


@jax.jit
def vision_layer(layer: Layer, x: jax.Array, seen: Seen, angles: jax.Array | None) -> jax.Array:
    """One layer as a function, so that layers with equal specs are traced and compiled once.

    On a CPU tiles that do not see one another pass it one by one, for what lies between its parts then stays in caches.
    """
    if seen.tile is None or len(x) <= seen.tile or traced_platform() != "cpu":
        return layer(x, seen, angles)
    tiles = tuple(each.reshape(-1, seen.tile, *each.shape[1:]) for each in (x, seen.segments))
    turned = None if angles is None else angles.reshape(-1, seen.tile, angles.shape[-1])
    alone = partial(Seen, tile=seen.tile, reach=seen.reach)
    return jax.lax.map(lambda each: layer(each[0], alone(each[1]), each[2]), (*tiles, turned)).reshape(x.shape)


class Steps(nnx.Module):
    """The steps of a projector, numbered."""

    def __init__(self, steps: Sequence[Step], size: int, *, dtype: jnp.dtype) -> None:
        self.steps, self.sizes = tuple(steps), [size]
        for number, step in enumerate(self.steps):
            match step:
                case Normed(norm=norm):
                    self._set(number, build_norm(norm, size))
                case Merged(side, order):
                    size = size if order == "mean" else size * side**2
                case Joined(count):
                    size *= count
                case Standardized(learned=True):
                    self._set(number, Standardizing(size))
                case Projected(out, bias):
                    self._set(number, Linear(size, out, bias=bias, dtype=dtype))
                    size = out
                case Halved():
                    size //= 2
                case Fed(feed_forward, out):
                    self._set(number, _fed(feed_forward, size, dtype, out=out))
                    size = size if out is None else out
            self.sizes.append(size)

    def _set(self, number: int, module: nnx.Module) -> None:
        setattr(self, f"step{number}", module)

    def __call__(self, x: jax.Array, *, start: int = 0, end: int | None = None) -> jax.Array:
        """[P, W] to [N, D], by the steps ``start : end``."""
        for number, step in list(enumerate(self.steps))[start:end]:
            if isinstance(step, Merged):
                x = _merged(x, step)
                continue
            if isinstance(step, Shared):
                x = jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)
                continue
            if isinstance(step, Joined):
                x = x.reshape(len(x) // step.count, -1)
                continue
            if isinstance(step, Halved):
                values, gates = jnp.split(x.astype(jnp.float32), 2, axis=-1)
                x = (values * ACTIVATIONS[step.activation](gates)).astype(x.dtype)
                continue
            if isinstance(step, Standardized):
                wide = x.astype(jnp.float32) * step.factor
                x = (getattr(self, f"step{number}")(wide) if step.learned else wide).astype(x.dtype)
                continue
            x = getattr(self, f"step{number}")(x)
            if isinstance(step, Projected | Normed) and step.activation is not None:
                x = ACTIVATIONS[step.activation](x.astype(jnp.float32)).astype(x.dtype)
        return x


class Standardizing(nnx.Module):
    """``(x - bias) * scale``."""

    def __init__(self, size: int) -> None:
        self.bias = parameter((size,), jnp.float32, axes=(None,))
        self.scale = parameter((size,), jnp.float32, axes=(None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, W] to [N, W]."""
        return (x - self.bias.get_value()) * self.scale.get_value()


class VisionEncoder(nnx.Module):
    """An encoder with its projector.

    Args:
        dtype: dtype of weight matrices; norms and biases are f32.
        activation_dtype: dtype of everything between layers.
    """

    def __init__(self, spec: VisionSpec, *, dtype: jnp.dtype, activation_dtype: jnp.dtype) -> None:
        self.spec, self.activation_dtype = spec, activation_dtype
        size = spec.size
        self.patch_embed = Linear(spec.patch_values, size, bias=spec.patch_bias, dtype=dtype, plain=True)
        table = spec.table
        cells = 0 if table is None else table.cells + spec.class_token
        self.positions = None if table is None else parameter((cells, size), jnp.float32, axes=(None, None), plain=True)
        self.class_embed = parameter((size,), jnp.float32, axes=(None,)) if spec.class_token else None
        self.norm_patches = None if spec.norm_patches is None else build_norm(spec.norm_patches, size)
        self.norm_before = None if spec.norm_before is None else build_norm(spec.norm_before, size)
        self.layers = nnx.List([Layer(layer, size, spec.rope, dtype=dtype) for layer in spec.layers])
        self.norm_after = None if spec.norm_after is None else build_norm(spec.norm_after, size)
        seen = size * max(1, len(spec.beside))
        windowing = spec.windowing
        self.windowed = None if windowing is None else WindowPooling(windowing, seen, dtype=dtype)
        self.projector = Steps(spec.projector, seen if windowing is None else windowing.size, dtype=dtype)
        self.resampler = _resampler(spec, dtype)
        self.taps = nnx.List([Steps(spec.tap, size, dtype=dtype) for _ in spec.tapped])
        self.arranged = len(spec.projector) if spec.arranged is None else spec.arranged
        learned = (self.projector.sizes[self.arranged],)
        self.learned = nnx.List([parameter(learned, jnp.float32, axes=(None,)) for _ in range(spec.learned)])
        self.added = None if spec.tokens is None else parameter((spec.out,), jnp.float32, axes=(None,))

    def __call__(self, batch: PatchBatch) -> Encoded:
        """The feature rows of a batch."""
        return self.end(self.through(self.begin(batch), batch, range(len(self.layers))), batch)

    def begin(self, batch: PatchBatch) -> Underway:
        """A batch before the first layer."""
        x = normed(self.patch_embed(batch.patches.astype(self.activation_dtype)), self.norm_patches)
        if self.positions is not None:
            assert batch.places is not None and batch.place_shares is not None
            found = self.positions.get_value()[batch.places]  # [P, K, W]
            x = (x + jnp.einsum("pkw,pk->pw", found, batch.place_shares)).astype(x.dtype)
        if self.class_embed is not None:
            x = self._with_class(x)
        return Underway(normed(x, self.norm_before))

    def through(self, underway: Underway, batch: PatchBatch, layers: range) -> Underway:
        """A batch after some layers, which follow those that it has passed; its patches are not looked at."""
        spec, x, tapped, beside = self.spec, underway.x, list(underway.tapped), list(underway.beside)
        segments, positions = self._places(batch)
        rope = spec.rope
        angles = None if rope is None else angles_of(positions, rope, spec.layers[0].attention.head_dim)
        reach = None if spec.longest is None else spec.longest - 1
        all_of_tile = Seen(segments, None if spec.tile is None else spec.tile + spec.class_token, reach)
        near = None if batch.windows is None or spec.window is None else Seen(batch.windows, reach=spec.window**2 - 1)
        for number in layers:
            seen = near if spec.layers[number].windowed else all_of_tile
            assert seen is not None
            x = vision_layer(self.layers[number], x, seen, angles)
            if number in spec.tapped:
                tapped.append(self.taps[spec.tapped.index(number)](x))
            if number in spec.beside:
                beside.append(x)
        return Underway(x, tuple(tapped), tuple(beside))

    def end(self, underway: Underway, batch: PatchBatch) -> Encoded:
        """The feature rows of a batch after the last layer; its patches are not looked at."""
        spec = self.spec
        segments, positions = self._places(batch)
        x = normed(underway.x, self.norm_after)
        if spec.beside:
            in_order = sorted(spec.beside)
            x = jnp.concatenate([underway.beside[in_order.index(number)] for number in spec.beside], axis=-1)
        if self.class_embed is not None and spec.class_row != "first":
            assert spec.tile is not None
            tiles = x.reshape(-1, spec.tile + 1, x.shape[-1])
            x = tiles[:, 0] if spec.class_row == "only" else tiles[:, 1:].reshape(-1, x.shape[-1])
        if spec.filled_from is not None:
            x = jnp.where(batch.segments[:, None] < 0, 0, x)
        rows = self._projected(x, segments, positions, batch)
        tapped = [self._gathered(tap, batch) for tap in underway.tapped]
        return Encoded(rows, jnp.stack(tapped) if tapped else jnp.zeros((0, *rows.shape), rows.dtype))

    def _projected(self, x: jax.Array, segments: jax.Array, positions: jax.Array, batch: PatchBatch) -> jax.Array:
        if self.resampler is not None:
            return self.resampler(x, segments, positions)
        if self.windowed is not None:
            return self._of_windows(self.windowed, x, batch)
        rows = self._gathered(self.projector(x, end=self.arranged), batch)
        return self.projector(rows, start=self.arranged)

    def _of_windows(self, windowed: WindowPooling, x: jax.Array, batch: PatchBatch) -> jax.Array:
        """The rows of windows of patches, with the learned ones between them."""
        assert batch.sources is not None and batch.source_shares is not None
        rows = self.projector(windowed(x, batch.sources, batch.source_shares))
        if self.added is not None:
            rows = (rows + self.added.get_value()).astype(rows.dtype)
        for number, learned in enumerate(self.learned):
            rows = jnp.where(batch.sources[:, :1] == -1 - number, learned.get_value().astype(rows.dtype), rows)
        return rows

    def _with_class(self, x: jax.Array) -> jax.Array:
        """[P, W] with the class token before each tile."""
        spec = self.spec
        assert self.class_embed is not None and spec.tile is not None
        first = self.class_embed.get_value()
        if self.positions is not None:
            first = first + self.positions.get_value()[0]
        tiles = x.reshape(-1, spec.tile, spec.size)
        first = jnp.broadcast_to(first.astype(x.dtype), (len(tiles), 1, spec.size))
        return jnp.concatenate([first, tiles], 1).reshape(-1, spec.size)

    def _places(self, batch: PatchBatch) -> tuple[jax.Array, jax.Array]:
        """Segments and positions, i32 [P] and [P, 2], with those of class tokens."""
        spec = self.spec
        if self.class_embed is None:
            return batch.segments, batch.positions
        of_tile = batch.segments.reshape(-1, spec.tile)
        places = batch.positions.reshape(-1, spec.tile, 2)
        nowhere = 0 if spec.rope is None else -spec.rope.offset  # where nothing turns
        return (
            jnp.concatenate([of_tile[:, :1], of_tile], 1).reshape(-1),
            jnp.concatenate([jnp.full_like(places[:, :1], nowhere), places], 1).reshape(-1, 2),
        )

    def _gathered(self, rows: jax.Array, batch: PatchBatch) -> jax.Array:
        """Feature rows in order, as weighted sums of merged patches and learned rows where a picture says so."""
        if batch.order is not None:
            rows = rows[batch.order]
        if batch.sources is None:
            return rows
        assert batch.source_shares is not None
        if self.spec.sources > FEW:  # one after another, for all at once would take as many times the memory
            return _summed(rows, batch.sources, batch.source_shares)
        found = rows[jnp.maximum(batch.sources, 0)].astype(jnp.float32)  # [N, J, D]
        for number, learned in enumerate(self.learned):
            found = jnp.where(batch.sources[..., None] == -1 - number, learned.get_value(), found)
        return jnp.einsum("njd,nj->nd", found, batch.source_shares).astype(rows.dtype)


def _summed(rows: jax.Array, sources: jax.Array, shares: jax.Array) -> jax.Array:
    """Weighted sums of rows [M, D], by i32 [N, J] and f32 [N, J]; none of them is a learned one."""

    def add(total: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        source, share = each
        return total + rows[source].astype(jnp.float32) * share[:, None], None

    start = jnp.zeros((len(sources), rows.shape[-1]), jnp.float32)
    return jax.lax.scan(add, start, (sources.T, shares.T))[0].astype(rows.dtype)


def _resampler(spec: VisionSpec, dtype: jnp.dtype) -> Perceiver | Probe | Resampler | None:
    if isinstance(spec.resampler, Probing):
        return Probe(spec.resampler, spec.size, dtype=dtype)
    if isinstance(spec.resampler, Perceiving):
        return Perceiver(spec.resampler, spec.size, spec.out, dtype=dtype)
    return None if spec.resampler is None else Resampler(spec.resampler, spec.size, spec.out, dtype=dtype)


def angles_of(positions: jax.Array, rope: Rope2D, head_dim: int) -> jax.Array:
    """The angle of each pair of a head's entries, f32 [P, head_dim / 2].

    Args:
        positions: i32 [P, 2], row and column.
    """
    pairs = head_dim // 2
    places = positions.astype(jnp.float32) + rope.offset
    first, second = (places[:, 1:], places[:, :1]) if rope.column_first else (places[:, :1], places[:, 1:])
    if rope.order != "by turns":
        rates = rope.theta ** (-jnp.arange(0, pairs, 2, dtype=jnp.float32) / pairs)
        both = jnp.stack([first * rates, second * rates], axis=-2 if rope.order == "halves" else -1)
        return both.reshape(len(places), -1)
    rates = rope.theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    return jnp.concatenate([first * rates[0::2], second * rates[1::2]], axis=-1)


def _fed(
    spec: MLP | GatedMLP, size: int, dtype: jnp.dtype, *, clipped: bool = False, out: int | None = None
) -> InnerModule:
    make = gated_mlp_module if isinstance(spec, GatedMLP) else MLPModule
    made = make(spec, size, dtype=dtype)  # type: ignore[arg-type]
    if clipped:
        if made.gate_proj is not None:
            made.gate_proj = ClippedLinear(size, spec.inner, bias=spec.bias, dtype=dtype)
        made.up_proj = ClippedLinear(size, spec.inner, bias=spec.bias, dtype=dtype)
        made.down_proj = ClippedLinear(spec.inner, size, bias=spec.bias, dtype=dtype)
    if out is not None:
        bias = spec.down_bias if isinstance(spec, GatedMLP) and spec.down_bias is not None else spec.bias
        made.down_proj = Linear(spec.inner, out, bias=bias, dtype=dtype)
    return made


def _merged(x: jax.Array, step: Merged) -> jax.Array:
    """[P, W] to [P / side², .]; patches of a square stand one after another."""
    squares = x.reshape(-1, step.side**2, x.shape[-1])
    if step.order == "mean":
        return squares.astype(jnp.float32).mean(axis=1).astype(x.dtype)
    if step.order == "channels":
        squares = squares.swapaxes(1, 2)
    return squares.reshape(len(squares), -1)


def _scaled(x: jax.Array, scale: nnx.Param | None) -> jax.Array:
    return x if scale is None else x * scale.get_value().astype(x.dtype)
