"""Products with matrices in panels, against those of their rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.cpu import matrices
from llmjax.kernels.cpu.library import forced_isa
from llmjax.kernels.cpu.packing import fill_panels
from llmjax.kernels.dense_linear import PANEL_LINEAR
from llmjax.kernels.linear import linear
from llmjax.kernels.panels import PanelTensor, panels_shape
from llmjax.kernels.registry import traced_for
from tests.kernels.instruction_sets import NATIVE, USABLE

RNG = np.random.default_rng(3)
each_taking_isa = pytest.mark.parametrize(
    "isa", [isa for isa in USABLE if isa not in matrices.WITHOUT_PANELS], indirect=True
)
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ library is not built")
# Some of them do not fill their last panel, chunk or pair of columns.
SHAPES = [(64, 64), (32, 608), (40, 72), (81, 33), (7, 1), (100, 700)]
ROUNDING = ("avx512bf16", "amx")  # which multiply x as bf16; the others as it is


def in_panels(weight: jax.Array) -> PanelTensor:
    panels = np.full(panels_shape(*weight.shape), 7, weight.dtype)
    fill_panels(np.asarray(weight), panels)
    return PanelTensor(jnp.asarray(panels), *weight.shape)


def matrix(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape) / np.sqrt(shape[1]), jnp.bfloat16)


def expected(x: Any, weight: jax.Array, bias: Any, isa: str) -> Any:
    taken = np.asarray(jnp.asarray(x, jnp.bfloat16) if isa in ROUNDING else x, np.float64)
    return taken @ np.asarray(weight, np.float64).T + np.asarray(bias, np.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_panels_hold_the_matrix(shape: tuple[int, int]) -> None:
    weight = matrix(*shape)
    panels = in_panels(weight)
    assert panels.shape == shape
    np.testing.assert_array_equal(np.asarray(panels.rows), np.asarray(weight))
    kept = np.asarray(panels.panels).reshape(-1, panels.panels.shape[1], 2, 16, 16, 2)
    assert kept[0, 0, 0, 0, 0, 0] == weight[0, 0]
    if shape[0] > 17 and shape[1] > 37:
        assert kept[0, 1, 1, 2, 1, 1] == weight[17, 37]
    assert np.count_nonzero(kept) == np.count_nonzero(weight)


@each_taking_isa
@pytest.mark.parametrize("rows", [1, 13, 16, 33, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_rows(shape: tuple[int, int], rows: int, isa: str) -> None:
    weight, bias = matrix(*shape), jnp.asarray(RNG.standard_normal(shape[0]), jnp.float32)
    x = jnp.asarray(RNG.standard_normal((rows, shape[1])), jnp.float32)
    panels = in_panels(weight)
    assert PANEL_LINEAR.pick("cpu", x, panels, bias).name == "C++"
    with traced_for("cpu"):
        out = jax.jit(linear)(x, panels, bias)
    np.testing.assert_allclose(out, expected(x, weight, bias, isa), atol=2e-6 * np.sqrt(shape[1]) + 1e-6)


@each_taking_isa
def test_a_row_does_not_depend_on_the_others(isa: str) -> None:
    panels, bias = in_panels(matrix(96, 1200)), jnp.asarray(RNG.standard_normal(96), jnp.float32)
    x = jnp.asarray(RNG.standard_normal((300, 1200)), jnp.float32)
    with traced_for("cpu"):
        product = jax.jit(linear)
        together = np.asarray(product(x, panels, bias))
        for begin, end in [(0, 1), (5, 38), (40, 200)]:
            np.testing.assert_array_equal(product(x[begin:end], panels, bias), together[begin:end])


def test_narrower_instruction_sets_take_the_rows() -> None:
    weight, bias = matrix(40, 72), jnp.zeros(40, jnp.float32)
    x = jnp.asarray(RNG.standard_normal((20, 72)), jnp.float32)
    panels = in_panels(weight)
    with forced_isa("generic"), traced_for("cpu"):
        assert matrices.refuses(panels) == "this instruction set does not take panels"
        out = jax.block_until_ready(jax.jit(lambda x, panels: linear(x, panels, bias))(x, panels))
    np.testing.assert_allclose(out, expected(x, weight, bias, "generic"), atol=0.02)
