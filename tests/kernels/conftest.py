"""The card that tests marked ``cuda`` run on: ``JAX_PLATFORMS=cuda,cpu python -m pytest -m cuda``."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def cuda_device() -> Iterator[jax.Device]:
    """An NVIDIA GPU as the default device; the test is skipped where there is none."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("no NVIDIA GPU")
    with jax.default_device(device):
        yield device
