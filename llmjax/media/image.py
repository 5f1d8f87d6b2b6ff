"""A picture as an encoder takes it: plain data that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """A picture as an encoder takes it.

    Attributes:
        patches: f32 [P, V], the values of each patch, in the encoder's order.
        grid: frames or tiles, then rows and columns of patches in each.
        further: the same of tiles of other sizes, which follow.
        num_rows: how many feature rows it becomes in the text model.
        tokens: ids that replace its placeholder in the prompt; a feature row goes where the id is the family's row
            token.
        digest: 32 bytes of a hash of all that decides the rows: pixels with their mode and size, orientation, and the
            processor with its settings.
        sources: i32 [num_rows, J], rows of the encoder of which each feature row is a weighted sum, counted from the
            picture's first; -1 is the first learned row, -2 the second. None: the encoder's rows as they are.
        shares: f32 [num_rows, J], the weights of ``sources``.
        unseen: i32 [U], numbers of the patches that no other sees, though they see the others of their tile: its last
            rows and columns. None: there are none.
        row_token: the token at which its feature rows stand, if that is not the family's for pictures.
        moment: the position of a video's frames on the axis of time, counted from its first ones, where all of them
            share rows and columns (Qwen2-VL); None: text goes on after each picture.
    """

    patches: NDArray[np.float32]
    grid: tuple[int, int, int]
    num_rows: int
    tokens: tuple[int, ...]
    digest: bytes
    sources: NDArray[np.int32] | None = None
    shares: NDArray[np.float32] | None = None
    row_token: int | None = None
    moment: int | None = None
    further: tuple[tuple[int, int, int], ...] = ()
    unseen: NDArray[np.int32] | None = None

    @property
    def nbytes(self) -> int:
        """The size of its patches."""
        return self.patches.nbytes


@dataclass(frozen=True, eq=False)
class PreparedVideo:
    """A video as an encoder takes it: a picture for each patch's frames, which see no others.

    Attributes:
        pictures: in order, without the texts around them.
        times: for each of them, when its frames are, in seconds.
    """

    pictures: tuple[PreparedImage, ...]
    times: tuple[tuple[float, ...], ...]

    @property
    def nbytes(self) -> int:
        """The size of its patches."""
        return sum(picture.nbytes for picture in self.pictures)
