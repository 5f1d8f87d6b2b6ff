"""The encoder of images: a program for each number of patches, compiled when an image needs it, run between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait

import numpy as np

from llmjax.engine.core.media import Encoding, PromptMedia
from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.commands import ProgramName, RunEncoder
from llmjax.engine.programs.cache import Executable
from llmjax.engine.programs.compiler import build_one
from llmjax.engine.programs.threads import CompileThreads
from llmjax.models.vision.packing import bucket, num_rows, pack
from llmjax.models.vision.spec import VisionSpec


def commands_of(spec: VisionSpec, encodings: Iterable[Encoding], *, nowhere: int) -> Iterator[RunEncoder]:
    """The commands that encode images, one each.

    Args:
        nowhere: where rows of padding go, which no pool has.
    """
    for encoding in encodings:
        patches = bucket(spec, len(encoding.image.patches))
        places = np.full(num_rows(spec, patches), nowhere, np.int32)
        places[: len(encoding.places)] = encoding.places
        yield RunEncoder(program_of(patches).bucket, places, pack(spec, [encoding.image], patches=patches))


def program_of(patches: int) -> ProgramName:
    """The name of the program that encodes up to a number of patches."""
    return ProgramName("encode", Bucket(tokens=patches, rows=0, decode=False))


class EncoderPrograms:
    """The programs that encode images. They have their own thread, because the others may wait for a lull.

    Args:
        spec: the encoder.
        build: compiles or reads the program for a bucket.
    """

    def __init__(self, spec: VisionSpec, build: Callable[[Bucket], Executable]) -> None:
        self._spec = spec
        self._build = build
        self._threads = CompileThreads(1)
        self._lock = threading.Lock()
        self._programs: dict[int, Future[Executable]] = {}

    def ready(self, media: PromptMedia, *, seconds: float = 0.0) -> bool:
        """Whether the images of a prompt can be encoded; what is missing for that is compiled.

        Args:
            seconds: how long to wait for it.

        Raises:
            CompileError: they never can.
        """
        futures = [self._program(len(one.image.patches)) for one in media.images]
        if not all(future.done() for future in futures) and wait(futures, timeout=seconds).not_done:
            return False
        for future in futures:
            future.result()
        return True

    def close(self, *, wait: bool = True) -> None:
        """Stops compiling, as `CompileThreads.close` does."""
        self._threads.close(wait=wait)

    def _program(self, patches: int) -> Future[Executable]:
        size = bucket(self._spec, patches)
        with self._lock:
            if size not in self._programs:
                self._programs[size] = self._threads.submit(build_one, self._build, program_of(size).bucket)
            return self._programs[size]
