"""Angles and rotation against complex multiplication in f64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.rope import rotate
from llmjax.models import RopeConfig
from llmjax.models.layers.rope import rotation

INV_FREQ = tuple((500000.0 ** (-np.arange(0, 16, 2) / 16)).astype(np.float32).tolist())


def test_angles_are_exact_in_f32_up_to_position_131072() -> None:
    positions = np.array([0, 1, 255, 256, 257, 4095, 65537, 131071, 131072], np.int32)
    by = jax.jit(lambda p: rotation(p, RopeConfig(INV_FREQ, attention_factor=1.5)))(positions)
    angles = (positions.astype(np.float32)[:, None] * np.array(INV_FREQ, np.float32)).astype(np.float64)
    np.testing.assert_allclose(by.cos, 1.5 * np.cos(angles), rtol=0, atol=2e-7)
    np.testing.assert_allclose(by.sin, 1.5 * np.sin(angles), rtol=0, atol=2e-7)
    assert by.cos.dtype == by.sin.dtype == jnp.float32


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_rotation_is_multiplication_by_a_unit_complex_number(interleaved: bool, head_dim: int) -> None:
    x = np.random.default_rng(0).standard_normal((5, 3, head_dim)).astype(np.float32)
    positions = np.array([0, 3, 9, 100, 2], np.int32)
    got = np.asarray(
        rotate(jnp.asarray(x), rotation(jnp.asarray(positions), RopeConfig(INV_FREQ)), interleaved=interleaved)
    )
    first, second = (slice(0, 16, 2), slice(1, 16, 2)) if interleaved else (slice(0, 8), slice(8, 16))
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * np.outer(positions, INV_FREQ))[:, None]
    np.testing.assert_allclose(got[..., first], turned.real, atol=1e-5)
    np.testing.assert_allclose(got[..., second], turned.imag, atol=1e-5)
    np.testing.assert_array_equal(got[..., 16:], x[..., 16:])


def test_bf16_heads_are_rotated_in_f32() -> None:
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 2, 16)), jnp.bfloat16)
    by = rotation(jnp.array([257, 131071, 5, 1]), RopeConfig(INV_FREQ))
    got = rotate(x, by)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rotate(x.astype(jnp.float32), by).astype(jnp.bfloat16))
