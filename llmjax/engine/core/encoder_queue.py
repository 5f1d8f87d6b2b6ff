"""Images that wait for the encoder, which runs in parts between the steps of streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmjax.engine.core.interfaces import EncoderRun, Runner
from llmjax.engine.core.media import Encoding
from llmjax.engine.core.pace import EncoderPace


class EncoderQueue:
    """The images that wait for the encoder, in order, and its run that has begun.

    Args:
        runner: computes its runs.
        pace: how much time it takes from streams.
    """

    def __init__(self, runner: Runner, pace: EncoderPace) -> None:
        self._runner = runner
        self._pace = pace
        self._waiting: list[Encoding] = []
        self._run: EncoderRun | None = None
        self._parts = 0

    @property
    def busy(self) -> bool:
        """Whether there is something left to encode."""
        return self._run is not None or bool(self._waiting)

    def add(self, encodings: Iterable[Encoding]) -> None:
        """Queues images."""
        self._waiting += encodings

    def advance(self, *, beside_streams: bool) -> Sequence[Encoding]:
        """Starts what is computed before the next step: a part, if it is time for it beside streams; else the rest of a
        run. Returns the images that are encoded then."""
        if self._run is None and self._waiting:
            self._run = self._runner.encoder_run(self._waiting)
            del self._waiting[: len(self._run.encodings)]
        if (run := self._run) is None or (beside_streams and not self._pace.goes_on):
            return ()
        for _ in range(1 if beside_streams else run.left):
            run.start_part()
            self._parts += 1
        if beside_streams:
            self._pace.begun()
        if run.left:
            return ()
        self._run = None
        return run.encodings

    def abandon(self) -> Sequence[Encoding]:
        """Drops all images, for which nobody waits, and returns them."""
        run = () if self._run is None else self._run.encodings
        dropped, self._run, self._waiting = (*run, *self._waiting), None, []
        return dropped

    def take_parts(self) -> int:
        """Parts that come before the next step; each is told once."""
        parts, self._parts = self._parts, 0
        return parts
