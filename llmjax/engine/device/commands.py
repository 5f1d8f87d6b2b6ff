"""The commands that change what is on the devices: every rank's executor applies the same ones in the same order."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy.typing as npt

from llmjax.engine.clients.wire import Message
from llmjax.engine.device.batch import Bucket

Values = npt.NDArray[Any]


class ProgramName(msgspec.Struct, array_like=True, frozen=True):
    """The name of a compiled program.

    Args:
        kind: ``step``, ``masked`` or ``encode``.
        bucket: the shapes that it is compiled for.
    """

    kind: str
    bucket: Bucket

    @classmethod
    def step(cls, bucket: Bucket) -> ProgramName:
        """The program that runs the steps of a bucket."""
        return cls("step", bucket)

    @classmethod
    def masked(cls, bucket: Bucket) -> ProgramName:
        """The program that samples under masks after the steps of a bucket. It depends on rows and family alone: where
        there are adapters, heads have theirs."""
        return cls("masked", Bucket(tokens=0, rows=bucket.rows, decode=bucket.decode))


class RunStep(Message, tag="run_step"):
    """Runs a step.

    Args:
        bucket: the step's shapes.
        packed: i32 [n], the batch as `BatchLayout.pack` makes it.
    """

    bucket: Bucket
    packed: Values


class RunMasked(Message, tag="run_masked"):
    """Samples under masks what the step before has left to be sampled.

    Args:
        bucket: the step's shapes.
        mask: i32 [rows, words], bits of the tokens that each row may sample.
    """

    bucket: Bucket
    mask: Values


class PlaceImages(Message, tag="place_images"):
    """Says which images the encoder's next run encodes.

    Args:
        places: i32 [N], rows of the media pool that the batch's rows go to.
        batch: the fields of a `PatchBatch`.
        adapter: values of the adapter with which they are encoded, see `EncoderAdapters`; None: there is none.
    """

    places: Values
    batch: dict[str, Values]
    adapter: list[Values] | None = None


class RunEncoder(Message, tag="run_encoder"):
    """Runs a part of the encoder on the images that were placed; the parts of a run come one after another.

    Args:
        bucket: the number of their patches, as ``rows`` that of the part, and whether they have an adapter.
    """

    bucket: Bucket


class LoadAdapter(Message, tag="load_adapter"):
    """Writes an adapter to one of the devices' places.

    Args:
        place: 1 to ``max_loras``.
        values: see ``llmjax.engine.adapters.layout.put_adapter``; those of all stages, each of which takes its own.
    """

    place: int
    values: list[Values]


class Edit(Message, tag="edit"):
    """Edits a part of the device state.

    Args:
        name: the edit, a key of ``llmjax.engine.device.edits.EDITS``.
        arguments: what the edit takes after that part.
    """

    name: str
    arguments: list[Values]


class SetSampled(Message, tag="set_sampled"):
    """Tells a stage what rows have sampled in the step before, which the last stage alone knows.

    Args:
        slot: i32 [N].
        last_token, length: i32 [N], as `RowState` has them.
    """

    slot: Values
    last_token: Values
    length: Values


class ReadPages(Message, tag="read_pages"):
    """Reads this rank's part of some pages, as they are when all commands before have run.

    Args:
        number: names the answer.
        group: the group of layers.
    """

    number: int
    group: int
    pages: list[int]


class WritePages(Message, tag="write_pages"):
    """Writes this rank's part of some pages.

    Args:
        group: the group of layers.
        arrays: new content, for each stack of layers [pages, layers, …].
    """

    group: int
    pages: list[int]
    arrays: list[Values]


class Sleep(Message, tag="sleep"):
    """Frees the devices' memory of state, adapters and weights; only `WakeWeights` and `WakeState` may follow.

    Args:
        discard: whether the weights leave the host's memory too, and are loaded from their files again. Otherwise they
            wait there; on a CPU they are there already, and stay as they are.
    """

    discard: bool


class WakeWeights(Message, tag="wake_weights"):
    """Brings the weights back, and makes places for adapters, which are empty; another rank that cannot ends, and the
    group with it."""


class WakeState(Message, tag="wake_state"):
    """Makes a new state, without KV entries and tokens."""


Command = (
    RunStep
    | RunMasked
    | PlaceImages
    | RunEncoder
    | LoadAdapter
    | Edit
    | SetSampled
    | ReadPages
    | WritePages
    | Sleep
    | WakeWeights
    | WakeState
)
