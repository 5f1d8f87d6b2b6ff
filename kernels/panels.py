"""Matrices of bf16 in the order in which tile registers, and vectors, multiply many rows with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from llmjax.kernels.qtensor import CPU_TILE
from llmjax.kernels.row_format import CHUNK

ROWS_OF_PANEL = 2 * CPU_TILE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PanelTensor:
    """A matrix [out, in] that is multiplied with many rows of x alone, so that no product turns it anew.

    Attributes:
        panels: bf16 [panels, chunks, 2, 16, 32]. A panel has 32 rows of the matrix, a chunk 32 of its columns: two
            tiles of 16 rows each, in which the rows' numbers of two columns lie side by side. That is what a tile
            register holds, and each pair of columns is a vector for bf16's dot products. What rows and columns lack is
            zeros.
        size_out: rows.
        size_in: columns.
    """

    panels: jax.Array
    size_out: int = field(metadata={"static": True})
    size_in: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.size_out, self.size_in

    @property
    def dtype(self) -> jnp.dtype:
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    @property
    def rows(self) -> jax.Array:
        """The matrix row by row, bf16 [out, in]."""
        panels, chunks = self.panels.shape[:2]
        parts = self.panels.reshape(panels, chunks, 2, CPU_TILE, CPU_TILE, 2)  # ..., tile, pair of columns, row, column
        rows = parts.transpose(0, 2, 4, 1, 3, 5).reshape(panels * ROWS_OF_PANEL, chunks * CHUNK)
        return rows[: self.size_out, : self.size_in]


def panels_shape(size_out: int, size_in: int) -> tuple[int, ...]:
    """The shape of the panels of a matrix."""
    return (-(-size_out // ROWS_OF_PANEL), -(-size_in // CHUNK), 2, CPU_TILE, 2 * CPU_TILE)
