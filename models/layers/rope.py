"""Rotary position embedding: the result of a scaling rule, and the angles of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from llmjax.kernels.rope import Rotation
from llmjax.models.layers.rope_lengths import LongFrequencies, StretchedBase


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of one kind of layer, after the scaling rule is applied.

    The model only computes ``position * inv_freq``, except under rules that depend on the length of a sequence.
    """

    inv_freq: tuple[float, ...]  # [rotary_dim / 2]
    attention_factor: float = 1.0  # multiplies cos and sin
    interleaved: bool = False  # pairs (2i, 2i+1) instead of (i, i + d/2)
    axes: tuple[int, ...] | None = None  # [rotary_dim / 2], the axis of positions that each frequency turns by
    by_length: LongFrequencies | StretchedBase | None = None  # how ``inv_freq`` changes in long sequences
    max_position: int = field(default=0, compare=False)  # longest sequence that the scaling reaches, in tokens

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


def rotation(
    positions: jax.Array, rope: RopeConfig, prompt_len: jax.Array | int = 0, axes: jax.Array | None = None
) -> Rotation:
    """The rotation of each position, in f32 for all dtypes of activations: bf16 cannot tell position 257 from 256.

    Args:
        positions: i32 [T].
        prompt_len: tokens in the prompt of each position's sequence, i32 [T] or one for all.
        axes: i32 [3, T], positions on three axes, for rope that has some; None: they are equal.
    """
    inv_freq = jnp.asarray(rope.inv_freq, jnp.float32)
    if rope.by_length is not None:
        inv_freq = rope.by_length.at(inv_freq, jnp.maximum(prompt_len, positions + 1))
    if rope.axes is None or axes is None:
        angles = positions.astype(jnp.float32)[:, None] * inv_freq
    else:
        angles = axes[jnp.asarray(rope.axes)].T.astype(jnp.float32) * inv_freq
    return Rotation(cos=jnp.cos(angles) * rope.attention_factor, sin=jnp.sin(angles) * rope.attention_factor)
