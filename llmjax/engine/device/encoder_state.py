"""What the encoder of images has made of a batch so far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from llmjax.engine.device.commands import Values
from llmjax.models.vision.batch import PatchBatch


@dataclass(frozen=True)
class EncoderState:
    """A batch of images that the encoder takes in parts.

    Attributes:
        places: i32 [N], rows of the media pool that the batch's rows go to.
        batch: the images; without their patches when the first part has run.
        adapter: values of the adapter with which they are encoded, on the devices; None: there is none.
        underway: what the part before has made of it, an `Underway`; None: there was none.
    """

    places: Values
    batch: PatchBatch
    adapter: tuple[jax.Array, ...] | None = None
    underway: Any = None

    def after(self, underway: Any) -> EncoderState:
        """The same after one more part."""
        return replace(self, batch=without_patches(self.batch), underway=underway)


def without_patches(batch: PatchBatch) -> PatchBatch:
    """The batch as all parts but the first take it."""
    return replace(batch, patches=batch.patches[:0])
