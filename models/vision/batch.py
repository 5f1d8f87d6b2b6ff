"""Several pictures packed into one array of patches, of a size for which there is a program."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PatchBatch:
    """Patches of several pictures, padded.

    Attributes:
        patches: f32 [P, V].
        segments: i32 [P], the frame or tile of each patch, which is what it sees; -1: padding; below that: those of
            patches that none sees, see ``UNSEEN`` in ``packing``.
        positions: i32 [P, 2], row and column.
        windows: i32 [P], the window of each patch in layers that look at windows, whose patches stand one after
            another; None: there are none.
        order: i32 [N], where each merged patch stands, if windows have put them in another order.
        places: i32 [P, K], rows of the table of learned positions; None: there is no table.
        place_shares: f32 [P, K], the weights with which the rows of ``places`` are added.
        sources: i32 [N, J], the merged patches of which each feature row is a weighted sum; negative: a learned row, of
            which -1 is the first.
        source_shares: f32 [N, J], their weights. None, as ``sources``: rows are merged patches as they are.
    """

    patches: jax.Array
    segments: jax.Array
    positions: jax.Array
    windows: jax.Array | None = None
    order: jax.Array | None = None
    places: jax.Array | None = None
    place_shares: jax.Array | None = None
    sources: jax.Array | None = None
    source_shares: jax.Array | None = None
