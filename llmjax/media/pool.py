"""Processes that prepare pictures, kept warm, and killed when a picture takes too much."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import msgspec

from llmjax.errors import InvalidRequest, LLMJaxError, QueueFull
from llmjax.frames import LENGTH, send_frame
from llmjax.limited_process import LimitedProcess
from llmjax.media.image import PreparedImage, PreparedVideo
from llmjax.media.processor import ImageProcessor
from llmjax.media.reply import HEAD, Asked, PictureLimits, Reply, decoded
from llmjax.system import python_path

START_SECONDS = 120.0  # a bound for a machine that is very busy
CHUNK = 2**20  # bytes received at a time
# What a process needs of the environment. Keys and tokens are none of a decoder's business.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")


class PictureProcessError(LLMJaxError):
    """A process that prepares pictures cannot be started."""


class PicturePool:
    """Prepares pictures in up to ``size`` processes, which start when they are first needed. Thread-safe.

    Args:
        processor: prepares a picture.
        size: how many are prepared at a time; further ones wait.
        limits: limits on each.
    """

    def __init__(self, processor: ImageProcessor, *, size: int, limits: PictureLimits | None = None) -> None:
        self._processor = pickle.dumps(processor)
        self._limits = limits or PictureLimits()
        self._places = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def prepare(self, data: bytes, *, several: bool = False, processor: ImageProcessor | None = None) -> PreparedImage:
        """Decodes and prepares the picture in a file. Blocks.

        Args:
            several: whether the prompt has more pictures than the processor's ``alone``.
            processor: prepares it in place of the pool's own.

        Raises:
            InvalidRequest: it is not a picture, is too large, or takes more than the limits; the reason in one line.
            QueueFull: every process was busy for as long as one picture may take.
            PictureProcessError: no process can be started.
        """
        reply = self._exchanged(data, Asked.SEVERAL if several else Asked.ALONE, processor)
        if reply.image is None:
            raise InvalidRequest(reply.error or "it cannot be decoded")
        return reply.image

    def prepare_video(self, data: bytes, *, processor: ImageProcessor | None = None) -> PreparedVideo:
        """Decodes and prepares the video in a file. Blocks; takes and raises what `prepare` does."""
        reply = self._exchanged(data, Asked.VIDEO, processor)
        if reply.video is None:
            raise InvalidRequest(reply.error or "it cannot be decoded")
        return reply.video

    def _exchanged(self, data: bytes, asked: Asked, processor: ImageProcessor | None) -> Reply:
        other = b"" if processor is None else pickle.dumps(processor)
        if not self._places.acquire(timeout=self._limits.wall_seconds):
            raise QueueFull("other requests' pictures are being prepared", retry_after=1.0)
        try:
            process = self._take()
            try:
                reply = process.exchange(HEAD.pack(asked, len(other)) + other + data)
            except BaseException:
                process.kill()
                raise
            with self._lock:
                self._idle.append(process)
        finally:
            self._places.release()
        return reply

    def close(self) -> None:
        """Ends the processes that are idle; the pool can be used again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _take(self) -> _Process:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                return _Process(self._processor, self._limits)
            if process.alive:
                return process


class _Process:
    """A worker and the socket to it, for one exchange at a time."""

    def __init__(self, processor: bytes, limits: PictureLimits) -> None:
        self._limits = limits
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {"PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            self._process = LimitedProcess("llmjax.media.worker", limits, environment=environment)
        except OSError as error:
            raise PictureProcessError(f"the process for pictures cannot be started: {error}") from error
        try:
            self._exchanged(processor, START_SECONDS)
        except (OSError, msgspec.DecodeError, ValueError):
            code = self._process.exit_code()
            raise PictureProcessError(f"the process for pictures did not start (exit status {code})") from None

    @property
    def alive(self) -> bool:
        return self._process.alive

    def kill(self) -> None:
        self._process.kill()

    def exchange(self, data: bytes) -> Reply:
        try:
            return self._exchanged(data, self._limits.wall_seconds)
        except TimeoutError:
            raise InvalidRequest(f"preparing it took more than {self._limits.wall_seconds:g} s") from None
        except (OSError, msgspec.DecodeError, ValueError):
            if (code := self._process.exit_code()) == -signal.SIGPROF:
                raise InvalidRequest(
                    f"preparing it took more than {self._limits.cpu_seconds:g} s of computing time"
                ) from None
            raise InvalidRequest(f"preparing it ended its process (exit status {code})") from None

    def _exchanged(self, data: bytes, seconds: float) -> Reply:
        connection, deadline = self._process.socket, time.monotonic() + seconds
        connection.settimeout(seconds)
        send_frame(connection, data)
        frame = self._received(LENGTH.size, deadline)
        if (size := LENGTH.unpack(frame)[0]) > self._limits.reply:
            raise ConnectionResetError
        return decoded(self._received(size, deadline))

    def _received(self, size: int, deadline: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._process.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            if not (piece := self._process.socket.recv(min(size - len(data), CHUNK))):
                raise ConnectionResetError
            data += piece
        return data
