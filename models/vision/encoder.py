"""The encoder of pictures that all families share; attribute paths are the names of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import normed
from llmjax.models.vision.batch import PatchBatch
from llmjax.models.vision.layer import Layer, Seen, fed_module, vision_layer
from llmjax.models.vision.perceiver import Perceiver
from llmjax.models.vision.probe import Probe
from llmjax.models.vision.resampler import Resampler
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
                    self._set(number, fed_module(feed_forward, size, dtype, out=out))
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
        self.inserted = self.arranged if spec.inserted is None else spec.inserted
        learned = (self.projector.sizes[self.inserted],)
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
        if self.inserted == self.arranged:
            return self.projector(rows, start=self.arranged)
        rows = self._inserted(self.projector(rows, start=self.arranged, end=self.inserted), batch)
        return self.projector(rows, start=self.inserted)

    def _of_windows(self, windowed: WindowPooling, x: jax.Array, batch: PatchBatch) -> jax.Array:
        """The rows of windows of patches, with the learned ones between them."""
        assert batch.sources is not None and batch.source_shares is not None
        rows = self.projector(windowed(x, batch.sources, batch.source_shares))
        if self.added is not None:
            rows = (rows + self.added.get_value()).astype(rows.dtype)
        return self._inserted(rows, batch)

    def _inserted(self, rows: jax.Array, batch: PatchBatch) -> jax.Array:
        """Feature rows with the learned ones in their places, each of which has no other source."""
        assert batch.sources is not None
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
        for number, learned in enumerate(self.learned if self.inserted == self.arranged else ()):
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


def _merged(x: jax.Array, step: Merged) -> jax.Array:
    """[P, W] to [P / side², .]; patches of a square stand one after another."""
    squares = x.reshape(-1, step.side**2, x.shape[-1])
    if step.order == "mean":
        return squares.astype(jnp.float32).mean(axis=1).astype(x.dtype)
    if step.order == "channels":
        squares = squares.swapaxes(1, 2)
    return squares.reshape(len(squares), -1)
