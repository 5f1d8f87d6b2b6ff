"""The encoder of images: its programs for each number of patches, compiled when images need them, and its runs, which
go in parts between steps."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import takewhile

import numpy as np

from llmjax.engine.core.media import Encoding, PromptMedia
from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.commands import Command, PlaceImages, RunEncoder
from llmjax.engine.programs.cache import Executable
from llmjax.engine.programs.compiler import build_one
from llmjax.engine.programs.threads import CompileThreads
from llmjax.models.vision.packing import bucket, num_rows, pack
from llmjax.models.vision.spec import VisionSpec

MOST_PATCHES = 4096  # of a run of several images; with more, products are not faster


class EncoderRun:
    """A run of the encoder that goes in parts.

    Args:
        encodings: its images.
        commands: the commands of each part.
        apply: has every rank apply a command.
    """

    def __init__(
        self, encodings: Sequence[Encoding], commands: Sequence[Sequence[Command]], apply: Callable[[Command], object]
    ) -> None:
        self.encodings = encodings
        self._commands = list(commands)
        self._apply = apply

    @property
    def left(self) -> int:
        """Parts that have not been started."""
        return len(self._commands)

    def start_part(self) -> None:
        """Starts the next part, before all later dispatches run."""
        for command in self._commands.pop(0):
            self._apply(command)


def commands_of(spec: VisionSpec, encodings: Sequence[Encoding], *, parts: int, nowhere: int) -> list[list[Command]]:
    """The commands of each part of a run.

    Args:
        encodings: its images, all with the same adapter.
        parts: how many there are.
        nowhere: where rows of padding go, which no pool has.
    """
    images = [encoding.image for encoding in encodings]
    patches = bucket(spec, sum(len(image.patches) for image in images))
    places = np.full(num_rows(spec, patches), nowhere, np.int32)
    given = np.concatenate([encoding.places for encoding in encodings])
    places[: len(given)] = given
    adapter = encodings[0].adapter
    own = None if adapter is None else adapter.values
    shapes = [part_of(patches, number, adapted=adapter is not None) for number in range(parts)]
    runs: list[list[Command]] = [[RunEncoder(shape)] for shape in shapes]
    return [[PlaceImages(places, pack(spec, images, patches=patches), own), *runs[0]], *runs[1:]]


def part_of(patches: int, number: int, *, adapted: bool = False) -> Bucket:
    """The shapes of a part of the encoder's run on a number of patches, maybe with an adapter."""
    return Bucket(tokens=patches, rows=number, decode=False, adapters=adapted)


class EncoderPrograms:
    """The programs that encode images. They have their own thread, because the others may wait for a lull.

    Args:
        spec: the encoder.
        parts: in how many parts it runs on a number of patches.
        build: compiles or reads the program of a part.
    """

    def __init__(self, spec: VisionSpec, *, parts: Callable[[int], int], build: Callable[[Bucket], Executable]) -> None:
        self._spec = spec
        self._parts = parts
        self._build = build
        self._threads = CompileThreads(1)
        self._lock = threading.Lock()
        self._programs: dict[tuple[int, bool], Future[None]] = {}  # by patches, and whether there is an adapter

    def ready(self, media: PromptMedia, *, adapted: bool = False, seconds: float = 0.0) -> bool:
        """Whether the images of a prompt can be encoded, each in its own run; what is missing for that is compiled.

        Args:
            adapted: whether with an adapter.
            seconds: how long to wait for it.

        Raises:
            CompileError: they never can.
        """
        futures = [self._program(bucket(self._spec, len(one.image.patches)), adapted) for one in media.images]
        if not all(future.done() for future in futures) and wait(futures, timeout=seconds).not_done:
            return False
        for future in futures:
            future.result()
        return True

    def together(self, encodings: Sequence[Encoding]) -> int:
        """How many of the first images, which can be encoded, come into one run: as many as have the same adapter, and
        as there is a program for. One for more is compiled for later runs."""
        key, adapted = _adapter_of(encodings[0]), encodings[0].adapter is not None
        encodings = list(takewhile(lambda one: _adapter_of(one) == key, encodings))
        sizes = [bucket(self._spec, int(sum_)) for sum_ in np.cumsum([len(one.image.patches) for one in encodings])]
        count = max(bisect_right(sizes, MOST_PATCHES), 1)
        if count > 1:
            self._program(sizes[count - 1], adapted)
        while count > 1 and not self._is_there(sizes[count - 1], adapted):
            count -= 1
        return count

    def _is_there(self, patches: int, adapted: bool) -> bool:
        with self._lock:
            future = self._programs.get((patches, adapted))
        return future is not None and future.done() and future.exception() is None

    def close(self, *, wait: bool = True) -> None:
        """Stops compiling, as `CompileThreads.close` does."""
        self._threads.close(wait=wait)

    def _program(self, patches: int, adapted: bool) -> Future[None]:
        with self._lock:
            if (patches, adapted) not in self._programs:
                self._programs[patches, adapted] = self._threads.submit(self._build_parts, patches, adapted)
            return self._programs[patches, adapted]

    def _build_parts(self, patches: int, adapted: bool) -> None:
        for number in range(self._parts(patches)):
            build_one(self._build, part_of(patches, number, adapted=adapted))


def _adapter_of(encoding: Encoding) -> str | None:
    return None if encoding.adapter is None else encoding.adapter.digest
