"""GPTQ against the paper's own equations, which know nothing of Cholesky factors and blocks."""

from __future__ import annotations

import numpy as np
import pytest

from llmjax.errors import CheckpointError
from llmjax.quantization.calibration.gptq import InverseHessian, gptq
from llmjax.weights.uniform import Grid, IntegerScheme

DAMPING = 0.01


def correlated(columns: int, *, tokens: int = 400, seed: int = 0) -> np.ndarray:
    """Inputs [tokens, columns] of which some channels nearly follow from others, as those of models do."""
    rng = np.random.default_rng(seed)
    few = rng.standard_normal((tokens, columns // 4)) @ rng.standard_normal((columns // 4, columns))
    return (few + 0.3 * rng.standard_normal((tokens, columns))) * rng.uniform(0.1, 3, columns)


def gram_of(inputs: np.ndarray) -> np.ndarray:
    return inputs.T @ inputs / len(inputs)


def weights_of(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


def transcribed(weights: np.ndarray, gram: np.ndarray, scheme: IntegerScheme, *, static: bool = False) -> np.ndarray:
    """Equations 2 and 3 of the paper: each column is rounded, all that are left are corrected, and the column is taken
    out of the inverse Hessian by Gaussian elimination. Signed codes [out, in].
    """
    left = weights.astype(np.float64)
    hessian = 2 * gram + 2 * DAMPING * np.diag(gram).mean() * np.identity(len(gram))
    inverse = np.linalg.inv(hessian)
    size = scheme.group_size or weights.shape[1]
    whole = scheme.grid(weights)
    codes = np.empty(weights.shape, np.float32)
    for q in range(weights.shape[1]):
        if static:
            zeros = None if whole.zeros is None else whole.zeros[:, q // size, None]
            grid = Grid(whole.scales[:, q // size, None], zeros)
        elif q % size == 0:
            grid = scheme.grid(left[:, q : q + size].astype(np.float32))
        codes[:, q] = scheme.round(left[:, q : q + 1].astype(np.float32), grid)[:, 0]
        zero = 0 if grid.zeros is None else grid.zeros[:, 0]
        rounded = grid.scales[:, 0].astype(np.float64) * (codes[:, q] - zero)
        left[:, q:] -= np.outer((left[:, q] - rounded) / inverse[q, q], inverse[q, q:])
        inverse -= np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
        inverse[q, q] = 1  # done with; keeps numbers finite
    return codes


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "scheme",
    [
        IntegerScheme("int4", 4, 32),
        IntegerScheme("int4_asym", 4, 48, symmetric=False),  # groups that cross blocks
        IntegerScheme("int4", 4),
        IntegerScheme("int8", 8, symmetric=False),
    ],
)
def test_codes_of_the_papers_equations(scheme: IntegerScheme, static: bool) -> None:
    weights, gram = weights_of(24, 192), gram_of(correlated(192))
    found = gptq(weights, InverseHessian.of(gram, damping=DAMPING), scheme, static_groups=static)
    codes = found.codes.astype(np.float32) - (8 if scheme.bits == 4 else 0)
    expected = transcribed(weights, gram, scheme, static=static)
    # A number on the edge of two codes may fall to either side, and with it what follows in that row.
    assert (codes == expected).all(axis=1).mean() >= 0.9


def energies(weights: np.ndarray, inputs: np.ndarray, scheme: IntegerScheme, **options: bool) -> tuple[float, float]:
    """Squared errors of outputs with GPTQ and rounded to nearest."""
    order = {"act_order": options.pop("act_order")} if "act_order" in options else {}
    inverse = InverseHessian.of(gram_of(inputs), damping=DAMPING, **order)
    found = []
    for rows in (gptq(weights, inverse, scheme, **options), scheme.quantize(weights)):
        out = np.empty(weights.shape, np.float32)
        rows.dequantize(out)
        found.append(float(np.square(inputs @ (out - weights).T).sum()))
    return found[0], found[1]


@pytest.mark.parametrize("options", [{}, {"act_order": True}, {"static_groups": True}])
@pytest.mark.parametrize("scheme", [IntegerScheme("int4", 4, 64), IntegerScheme("int4", 4, 64, symmetric=False)])
def test_outputs_are_nearer_than_rounded_to_nearest(scheme: IntegerScheme, options: dict[str, bool]) -> None:
    for seed in range(3):
        ours, nearest = energies(weights_of(32, 128), correlated(128, seed=seed), scheme, **options)
        assert ours < 0.6 * nearest


def test_independent_inputs_leave_nothing_to_gain() -> None:
    scheme = IntegerScheme("int4", 4, 32)
    weights = weights_of(16, 64)
    rows = gptq(weights, InverseHessian.of(np.diag(np.arange(1.0, 65.0)), damping=DAMPING), scheme)
    nearest = scheme.quantize(weights)
    assert np.array_equal(rows.codes, nearest.codes) and np.array_equal(rows.scales, nearest.scales)


def test_channels_that_are_always_zero_are_rounded_to_nearest() -> None:
    inputs = correlated(64)
    inputs[:, 32:] = 0
    scheme, weights = IntegerScheme("int4", 4, 32), weights_of(16, 64)
    rows = gptq(weights, InverseHessian.of(gram_of(inputs), damping=DAMPING), scheme)
    assert np.array_equal(rows.codes[:, 32:], scheme.quantize(weights).codes[:, 32:])


def test_inputs_that_are_no_numbers() -> None:
    gram = gram_of(correlated(32))
    gram[3, 4] = np.nan
    with pytest.raises(CheckpointError, match="infinite or not a number"):
        InverseHessian.of(gram, damping=DAMPING)
    with pytest.raises(CheckpointError, match="more --damping would help"):
        InverseHessian.of(-np.identity(32), damping=DAMPING)
