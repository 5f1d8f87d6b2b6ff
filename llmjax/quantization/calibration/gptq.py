"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one by one, and the columns after each are adjusted
to compensate for its error in the outputs.

With H the Hessian of the outputs' squared error and U the upper Cholesky factor of its inverse, column i is rounded,
and its error, divided by U[i, i], times U[i, i + 1 :] is subtracted from the later columns (section 3.3, algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular  # type: ignore[import-untyped]

from llmjax.errors import CheckpointError
from llmjax.weights.rows import QuantizedRows
from llmjax.weights.uniform import Grid, IntegerScheme

BLOCK = 128  # columns after which the rest of the matrix is updated


@dataclass(frozen=True, eq=False)
class InverseHessian:
    """The data about the inputs that rounding columns in some order needs.

    Attributes:
        factor: f32 [in, in], upper triangular, transpose(factor) @ factor = inverse of H, in that order.
        order: intp [in], the column that is rounded first, second …; None: from left to right.
    """

    factor: np.ndarray
    order: np.ndarray | None

    @classmethod
    def of(cls, gram: np.ndarray, *, damping: float, act_order: bool = False) -> InverseHessian:
        """Inverts the Hessian.

        Args:
            gram: f64 [in, in], see `InputStatistics`.
            damping: share of the mean of the diagonal that is added to it.
            act_order: whether columns with the largest inputs are rounded first.

        Raises:
            CheckpointError: inputs are not numbers, or damping is too small.
        """
        hessian = gram.copy()
        diagonal = np.einsum("ii->i", hessian)
        # The columns of channels that are always 0 are rounded to nearest.
        diagonal[diagonal == 0] = 1
        order = np.argsort(-diagonal, kind="stable") if act_order else None
        diagonal += damping * diagonal.mean()
        if order is not None:
            hessian = hessian[np.ix_(order, order)]
        if not np.isfinite(hessian).all():
            raise CheckpointError("GPTQ was given inputs that are infinite or not a number")
        try:
            # H = R Rᵀ with R upper triangular: the Cholesky factor of H rotated by 180 degrees. Then U = R⁻¹.
            root = np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError as error:
            raise CheckpointError(f"GPTQ cannot invert the Hessian ({error}): more --damping would help") from None
        factor = solve_triangular(root, np.identity(len(root)), overwrite_b=True, check_finite=False)
        return cls(np.ascontiguousarray(factor, np.float32), order)


def gptq(
    weights: np.ndarray, inverse: InverseHessian, scheme: IntegerScheme, *, static_groups: bool = False
) -> QuantizedRows:
    """Quantizes a matrix.

    Args:
        weights: f32 [out, in].
        inverse: inverse Hessian of its inputs.
        scheme: defines the grid and the groups.
        static_groups: the scales of groups come from the original weights, not from weights that earlier columns have
            changed. This is always so if ``inverse`` has an order.
    """
    columns = weights.shape[1]
    group_size = scheme.group_size or columns
    order = np.arange(columns) if inverse.order is None else inverse.order
    static = static_groups or inverse.order is not None
    grids = _Grids.of(scheme, weights) if static else _Grids.empty(scheme, weights)
    rest = np.ascontiguousarray(weights.T[order], np.float32)  # [in, out], so that columns are contiguous
    codes = np.empty_like(rest)
    half = np.float32(1 << scheme.bits - 1)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = np.empty_like(rest[start:stop])
        for i in range(start, stop):
            group, first = divmod(int(order[i]), group_size)
            if not static and first == 0:
                # The block's columns are up to date; those after it still lack this block's updates.
                span = rest[i : i + group_size].copy()
                if i + group_size > stop:
                    span[stop - i :] -= inverse.factor[start:i, stop : i + group_size].T @ errors[: i - start]
                grids.fit(scheme, group, span.T)
            scale, zero = grids.scales[group], grids.zeros[group]
            code = np.clip(np.rint(rest[i] / scale + zero), -half, half - 1)
            error = (rest[i] - (code - zero) * scale) / inverse.factor[i, i]
            codes[i] = code
            errors[i - start] = error
            rest[i + 1 : stop] -= np.outer(inverse.factor[i, i + 1 : stop], error)
        rest[stop:] -= inverse.factor[start:stop, stop:].T @ errors
    if inverse.order is not None:
        codes = codes[np.argsort(inverse.order)]
    return scheme.rows(np.ascontiguousarray(codes.T), grids.grid(scheme))


@dataclass(frozen=True, eq=False)
class _Grids:
    """The grid of each group, filled group by group: f32 [groups, out]."""

    scales: np.ndarray
    zeros: np.ndarray

    @classmethod
    def empty(cls, scheme: IntegerScheme, weights: np.ndarray) -> _Grids:
        shape = (scheme.format(weights.shape[1]).num_groups, len(weights))
        return cls(np.zeros(shape, np.float32), np.zeros(shape, np.float32))

    @classmethod
    def of(cls, scheme: IntegerScheme, weights: np.ndarray) -> _Grids:
        grid = scheme.grid(weights)
        scales = np.ascontiguousarray(grid.scales.T, np.float32)
        return cls(scales, np.zeros_like(scales) if grid.zeros is None else np.ascontiguousarray(grid.zeros.T))

    def fit(self, scheme: IntegerScheme, group: int, weights: np.ndarray) -> None:
        """Fits the grid of a group to its columns [out, n]."""
        grid = scheme.grid(weights)
        self.scales[group] = grid.scales[:, 0]
        if grid.zeros is not None:
            self.zeros[group] = grid.zeros[:, 0]

    def grid(self, scheme: IntegerScheme) -> Grid:
        """The grid in the form of `scheme`."""
        scales = np.ascontiguousarray(self.scales.T).astype(scheme.scale_dtype)
        return Grid(scales, None if scheme.symmetric else np.ascontiguousarray(self.zeros.T))
