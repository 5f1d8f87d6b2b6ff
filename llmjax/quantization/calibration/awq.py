"""AWQ (Lin et al. 2023, arXiv:2306.00978): columns with large inputs are scaled up before rounding and their inputs
scaled down, which costs nothing where the scales can be folded into the operation before.

    scale = mean |input| ^ ratio,  ratio in 0, 1/20 … 19/20,  scales divided by sqrt(largest * smallest)

The ratio with the least squared error of the outputs is taken (section 3.2); a ratio of 0 is rounding to nearest. The
clipping of each group's range is searched in the same way. Both losses are computed from the Gram matrix of the inputs,
so they cover all tokens and not a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmjax.quantization.calibration.layer import InputStatistics
from llmjax.weights.uniform import IntegerScheme

RATIOS = 20
CLIPS = 10  # clipped ranges from the full one to half of it, as in AutoAWQ
SMALLEST = 1e-4  # lower limit of a scale before they are normalized


@dataclass(frozen=True, eq=False)
class RoundedMatrix:
    """A matrix and its quantizer.

    Attributes:
        weights: f32 [out, in].
        scheme: the quantizer.
    """

    weights: np.ndarray
    scheme: IntegerScheme

    def rounded(self, weights: np.ndarray) -> np.ndarray:
        """The weights after quantization, f32."""
        out = np.empty(weights.shape, np.float32)
        self.scheme.quantize(weights).dequantize(out)
        return out


def search_scales(
    projections: Sequence[RoundedMatrix], inputs: InputStatistics, *, magnitude: np.ndarray | None = None
) -> np.ndarray:
    """Finds the scales of columns for projections with the same inputs.

    Args:
        magnitude: f64 [in], mean magnitude of each channel if it differs from that of the inputs because channels share
            scales.

    Returns:
        f32 [in].
    """
    magnitude = inputs.magnitude if magnitude is None else magnitude
    best, least = np.ones(len(magnitude), np.float32), np.inf
    for step in range(RATIOS):
        scales = np.maximum(magnitude ** (step / RATIOS), SMALLEST)
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        loss = sum(inputs.energy(each.rounded(each.weights * scales) / scales - each.weights) for each in projections)
        if loss < least:
            best, least = scales, loss
    return best


def clipped(projection: RoundedMatrix, inputs: InputStatistics) -> np.ndarray:
    """Weights f32 [out, in], with the range of each group in each row clipped to the least error of the outputs."""
    weights = projection.weights
    rows, columns = weights.shape
    size = projection.scheme.group_size or columns
    result = weights.copy()
    for start in range(0, columns, size):
        group = weights[:, start : start + size]
        gram = inputs.gram[start : start + size, start : start + size].astype(np.float32)
        peak = np.abs(group).max(axis=1, keepdims=True)
        least = np.full(rows, np.inf, np.float32)
        for step in range(CLIPS):
            cut = np.clip(group, -peak * (1 - step / 2 / CLIPS), peak * (1 - step / 2 / CLIPS))
            gap = projection.rounded(cut) - group
            loss = np.einsum("oi,oi->o", gap @ gram, gap)
            better = loss < least
            least[better] = loss[better]
            result[better, start : start + size] = cut[better]
    return result
