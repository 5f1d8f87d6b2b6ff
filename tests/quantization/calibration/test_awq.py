"""AWQ's searches against the same done token by token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from llmjax.quantization.calibration.awq import RoundedMatrix, clipped, search_scales
from llmjax.quantization.calibration.layer import InputStatistics
from llmjax.weights.uniform import IntegerScheme

SCHEME = IntegerScheme("int4_asym", 4, 32, symmetric=False)


def outliers(columns: int = 64) -> np.ndarray:
    """Inputs [tokens, columns], f32, of which a few channels are large."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal((200, columns)) * np.where(rng.random(columns) < 0.1, 30, 1)).astype(np.float32)


def projection(rows: int = 24, seed: int = 1) -> RoundedMatrix:
    return RoundedMatrix(np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32), SCHEME)


def output_error(inputs: np.ndarray, weights: np.ndarray, found: np.ndarray) -> float:
    return float(np.square(inputs.astype(np.float64) @ (found - weights).T).sum() / len(inputs))


def test_statistics_are_sums_over_tokens() -> None:
    inputs = outliers()
    found = InputStatistics.of([jnp.asarray(inputs[:150]), jnp.asarray(inputs[150:])])
    np.testing.assert_allclose(found.gram, inputs.T.astype(np.float64) @ inputs / 200, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.magnitude, np.abs(inputs).mean(axis=0), rtol=1e-5)
    weights = projection().weights
    np.testing.assert_allclose(found.energy(weights), np.square(inputs @ weights.T).sum() / 200, rtol=1e-4)
    scales = np.random.default_rng(2).uniform(0.5, 2, 64)
    divided = found.divided(scales)
    np.testing.assert_allclose(divided.energy((weights * scales).astype(np.float32)), found.energy(weights), rtol=1e-4)


def test_scales_are_the_best_of_the_grid() -> None:
    inputs, both = outliers(), [projection(), projection(seed=3)]
    found = search_scales(both, InputStatistics.of([jnp.asarray(inputs)]))
    losses = {}
    for step in range(20):
        scales = np.abs(inputs).mean(axis=0, dtype=np.float64) ** (step / 20)
        scales /= np.sqrt(scales.max() * scales.min())
        losses[step] = sum(
            output_error(inputs, each.weights, each.rounded((each.weights * scales).astype(np.float32)) / scales)
            for each in both
        )
        if np.allclose(scales, found, rtol=1e-4):
            chosen = step
    assert losses[chosen] <= min(losses.values()) * 1.001
    assert losses[chosen] < 0.5 * losses[0]  # which is rounding to nearest


def test_equal_channels_are_left_alone() -> None:
    gram = np.identity(64)
    assert np.array_equal(search_scales([projection()], InputStatistics(gram, np.ones(64))), np.ones(64))


def test_clipping_never_loses_and_is_by_row_and_group() -> None:
    each, inputs = projection(), outliers()
    each.weights[3, 5] = 12.0  # one that stretches its group's range for nothing, as its input is small
    inputs[:, 5] *= 1e-3
    statistics = InputStatistics.of([jnp.asarray(inputs)])
    cut = clipped(each, statistics)
    assert abs(cut[3, 5]) < 12 and np.array_equal(np.abs(cut) <= np.abs(each.weights), np.ones_like(cut, bool))
    for row in range(24):
        for group in (slice(0, 32), slice(32, 64)):
            nearest, found = (each.rounded(weights)[row : row + 1, group] for weights in (each.weights, cut))
            old = each.weights[row : row + 1, group]
            assert output_error(inputs[:, group], old, found) <= output_error(inputs[:, group], old, nearest) * 1.001
