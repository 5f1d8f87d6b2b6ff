"""Attention in sequences that begin with a picture, whose rows later tokens look up by cross-attention (BLIP).

The rows stand at tokens. A layer of cross-attention keeps their keys and values in pages, as one of self-attention does
those of its tokens, so that prefixes and preemption need to know of neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmjax.kernels.attention import RaggedBatch


@dataclass(frozen=True)
class Picture:
    """What the tokens after a picture see of it.

    Attributes:
        rows: tokens at the start of every sequence that stand for the picture; what they see has no effect.
        size: number of values of a row, of which keys and values are made: the others see the picture alone. None: they
            see one another as ever, and not the picture.
    """

    rows: int
    size: int | None = None

    def seen(self, batch: RaggedBatch) -> RaggedBatch:
        """The batch as queries see it."""
        return replace(batch, first_key=self.rows) if self.size is None else replace(batch, end_key=self.rows)
