"""Which tokens a grammar allows next, as bits on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from llmjax.arrays import Ints


class Matcher(Protocol):
    """What knows the tokens that may come next, and may have failed."""

    def unsafe_compute_mask_ptr(self, pointer: int, size: int, /) -> None:
        """Writes a bit for each token into ``size`` bytes at an address."""


def mask_words(vocab_size: int) -> int:
    """Integers of 32 bits that hold a bit for each token."""
    return -(-vocab_size // 32)


def bit_masks(matchers: Mapping[int, Matcher], *, rows: int, vocab_size: int) -> Ints:
    """A bit for each token that each row may sample next, the lowest first: i32 [rows, mask_words(vocab_size)].

    Args:
        matchers: by row; rows without one may sample everything. One that fails, because a limit is reached, says so
            afterwards (``is_error``), and its row allows nothing of use.
    """
    masks = np.full((rows, mask_words(vocab_size)), -1, np.int32)
    for row, matcher in matchers.items():
        row_masks = masks[row]
        matcher.unsafe_compute_mask_ptr(row_masks.ctypes.data, row_masks.nbytes)  # lets go of the interpreter meanwhile
    return masks
