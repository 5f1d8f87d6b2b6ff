"""The time of kernels' threads is recorded by what they did, and only while somebody asks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.cpu import linear as cpu_linear
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.recording import WORK, recorded

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels are not built")


def test_products_are_recorded_as_products() -> None:
    x = jnp.asarray(np.ones((3, 64), np.float32))
    weight = jnp.asarray(np.ones((128, 64), np.float32))
    product = jax.jit(lambda x: cpu_linear.linears(x, [weight], [None]))
    jax.block_until_ready(product(x))
    with recorded() as recording:
        jax.block_until_ready(product(x))
    assert recording.calls == 1 and recording.phases >= 1
    assert recording.busy["products"] > 0
    assert sum(recording.busy[work] for work in WORK if work not in ("products", "rounding")) == 0
    assert recording.calling >= max(recording.busy.values()) / 2
    with recorded() as nothing:
        pass
    assert nothing.calls == 0 and sum(nothing.busy.values()) == 0
