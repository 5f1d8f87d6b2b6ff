"""The layers of encoders of pictures; attribute paths are the names of their parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.attention.segments import attend_segments
from llmjax.kernels.cpu import encoder_layer as cpu
from llmjax.kernels.encoder_layer import EncoderLayerRules, EncoderLayerWeights
from llmjax.kernels.registry import Implementation, Operation, traced_platform
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.modules.linear import Linear
from llmjax.models.modules.mlp import GatedMLPModule, InnerModule, MLPModule, gated_mlp_module
from llmjax.models.modules.norm import build_norm
from llmjax.models.modules.parameter import parameter
from llmjax.models.modules.residual import normed
from llmjax.models.vision.rotation import turn
from llmjax.models.vision.spec import Rope2D, VisionAttention, VisionLayer


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
        dtype = self.multiplied if self.narrow else None
        attended = attend_segments(
            q, k, v, seen.segments, scale=self.scale, dtype=dtype, tile=seen.tile, reach=seen.reach
        )
        return self.o_proj(attended.reshape(len(x), -1))

    @property
    def scale(self) -> float:
        """The factor of scores."""
        return self.spec.head_dim**-0.5 if self.spec.scale is None else self.spec.scale

    @property
    def multiplied(self) -> jnp.dtype:
        """What queries, keys and values are rounded to: the matrices' type, of which hardware that multiplies it is
        faster at scores too."""
        return jnp.dtype(jnp.bfloat16 if self.narrow else jnp.float32)


class Layer(nnx.Module):
    """One layer; see `VisionLayer`."""

    def __init__(self, spec: VisionLayer, size: int, rope: Rope2D | None, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.norm1 = build_norm(spec.norm, size)
        self.attn = Attention(spec.attention, size, rope, dtype=dtype, clipped=spec.clipped)
        self.after1 = None if spec.after is None else build_norm(spec.after, size)
        self.norm2 = build_norm(spec.norm, size)
        self.mlp = fed_module(spec.feed_forward, size, dtype, clipped=spec.clipped)
        self.after2 = None if spec.after is None else build_norm(spec.after, size)
        self.scale1 = parameter((size,), jnp.float32, axes=(None,)) if spec.scaled else None
        self.scale2 = parameter((size,), jnp.float32, axes=(None,)) if spec.scaled else None

    def __call__(self, x: jax.Array, seen: Seen, angles: jax.Array | None) -> jax.Array:
        mixed = normed(self.attn(self.norm1(x), seen, angles), self.after1)
        x = x + _scaled(mixed, self.scale1)
        fed = normed(self.mlp(self.norm2(x)), self.after2)
        return x + _scaled(fed, self.scale2)

    @property
    def unlike(self) -> str | None:
        """What kernels that compute a whole layer do not know of this one; None: they know all."""
        spec, mlp = self.spec, self.spec.feed_forward
        if isinstance(mlp, GatedMLP) and type(self.mlp) is not GatedMLPModule:
            return "its gate has steps of its own"
        has = {
            "learned factors": spec.scaled,
            "clipped products": spec.clipped,
            "norms of what it adds": spec.after is not None,
            "norms of values": spec.attention.v_norm is not None,
        }
        return next((f"it has {name}" for name, there in has.items() if there), None)

    @property
    def weights(self) -> EncoderLayerWeights:
        """The weights in the form that kernels take."""
        attention, mlp = self.attn, self.mlp
        return EncoderLayerWeights(
            before=self.norm1.norm,
            q=attention.q_proj.projection,
            k=attention.k_proj.projection,
            v=attention.v_proj.projection,
            o=attention.o_proj.projection,
            second=self.norm2.norm,
            gate=None if mlp.gate_proj is None else mlp.gate_proj.projection,
            up=mlp.up_proj.projection,
            down=mlp.down_proj.projection,
            q_norm=None if attention.q_norm is None else attention.q_norm.norm,
            k_norm=None if attention.k_norm is None else attention.k_norm.norm,
        )

    @property
    def rules(self) -> EncoderLayerRules:
        """The rest of what kernels take."""
        attention, rope = self.attn, self.attn.rope
        return EncoderLayerRules(
            heads=attention.spec.heads,
            scale=attention.scale,
            activation=self.spec.feed_forward.activation,
            whole=attention.spec.whole_norm is not None,
            pairs="half" if rope is None else rope.pairs,
            dtype=attention.multiplied,
        )


def _by_steps(layer: Layer, x: jax.Array, seen: Seen, angles: jax.Array | None) -> jax.Array:
    """On a CPU tiles that do not see one another pass the layer one by one, for what lies between its parts then stays
    in caches."""
    if seen.tile is None or len(x) <= seen.tile or traced_platform() != "cpu":
        return layer(x, seen, angles)
    tiles = tuple(each.reshape(-1, seen.tile, *each.shape[1:]) for each in (x, seen.segments))
    turned = None if angles is None else angles.reshape(-1, seen.tile, angles.shape[-1])
    alone = partial(Seen, tile=seen.tile, reach=seen.reach)
    return jax.lax.map(lambda each: layer(each[0], alone(each[1]), each[2]), (*tiles, turned)).reshape(x.shape)


def _by_kernel(layer: Layer, x: jax.Array, seen: Seen, angles: jax.Array | None) -> jax.Array:
    turns = None if angles is None else (jnp.cos(angles), jnp.sin(angles))
    return cpu.encoder_layer(x, layer.weights, turns, seen.segments, layer.rules)


def _kernel_refuses(layer: Layer, x: jax.Array, *_: Any) -> str | None:
    return layer.unlike or cpu.refuses(x, layer.weights, layer.rules)


# Positional: layer, x, seen, angles.
VISION_LAYER = Operation(
    "layer of an encoder",
    (
        Implementation("C++", _by_kernel, platform="cpu", refuses=_kernel_refuses),
        Implementation("in steps", _by_steps),
    ),
)


@jax.jit
def vision_layer(layer: Layer, x: jax.Array, seen: Seen, angles: jax.Array | None) -> jax.Array:
    """One layer as a function, so that layers with equal specs are traced and compiled once."""
    out: jax.Array = VISION_LAYER(layer, x, seen, angles)
    return out


def fed_module(
    spec: MLP | GatedMLP, size: int, dtype: jnp.dtype, *, clipped: bool = False, out: int | None = None
) -> InnerModule:
    """The module of a feed-forward sublayer.

    Args:
        clipped: as in `VisionLayer`.
        out: values of a row that comes out; None: ``size``.
    """
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


def _scaled(x: jax.Array, scale: nnx.Param | None) -> jax.Array:
    return x if scale is None else x * scale.get_value().astype(x.dtype)
