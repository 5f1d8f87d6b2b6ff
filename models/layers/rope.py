"""The angles of rotary position embedding, once per step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.rope import Rotation
from llmjax.models.config import RopeConfig


def rotation(positions: jax.Array, rope: RopeConfig) -> Rotation:
    """The rotation of each position, in f32 whatever the activations are: bf16 cannot tell position 257 from 256.

    Args:
        positions: i32 [T].
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inv_freq, jnp.float32)
    return Rotation(cos=jnp.cos(angles) * rope.attention_factor, sin=jnp.sin(angles) * rope.attention_factor)
