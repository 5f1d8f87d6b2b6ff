"""Processes that render chat templates, kept warm, and killed when a template takes too much."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import os
import signal
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future

from llmjax.errors import ChatTemplateError, InvalidRequest, LLMJaxError, QueueFull
from llmjax.frames import LENGTH, send_frame
from llmjax.limited_process import LimitedProcess
from llmjax.system import python_path
from llmjax.templating.wire import REPLY, Limits, RenderRequest, Status

CHUNK = 256 * 1024  # bytes received at a time
START_SECONDS = 60.0  # a bound for a machine that is very busy; it takes a tenth of a second
# What a process needs of the environment. Keys and tokens are none of a template's business.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")


class TemplateProcessError(LLMJaxError):
    """A process for templates cannot be started."""


class RenderPool:
    """Renders in up to ``size`` processes, which start when they are first needed. Thread-safe; serves any event loop.

    Args:
        size: how many requests are rendered at a time; further ones wait.
        limits: limits on each rendering.
    """

    def __init__(self, *, size: int, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._places: deque[_Process | None] = deque([None] * size)  # None: a process may be started
        self._waiting: deque[Future[_Process | None]] = deque()
        self._ending: list[_Process] = []

    def render(self, request: RenderRequest) -> str:
        """The prompt, or ``""`` if there is nothing but a template to compile. Blocks.

        Raises:
            InvalidRequest: the messages are malformed, or the template refuses them.
            ChatTemplateError: the template does not compile, fails, or takes more than the limits.
            QueueFull: every process was busy for as long as one rendering may take.
            TemplateProcessError: no process can be started.
        """
        data = request.to_bytes()
        process = self._claim_blocking()
        try:
            if process is None or not process.alive:
                process = _Process(self._limits)
            reply = process.exchange(data)
        except BaseException:
            self._drop(process)
            raise
        self._drop(process) if reply.last else self._release(process)
        return reply.prompt()

    async def render_async(self, request: RenderRequest) -> str:
        """Like ``render``, without blocking the event loop."""
        data = request.to_bytes()
        process = await self._claim_async()
        try:
            if process is None or not process.alive:
                process = await asyncio.to_thread(_Process, self._limits)
            reply = await process.exchange_async(data)
        except BaseException:
            self._drop(process)
            raise
        self._drop(process) if reply.last else self._release(process)
        return reply.prompt()

    def close(self) -> None:
        """Ends the processes that are idle; the pool can be used again."""
        with self._lock:
            idle = [process for process in self._places if process is not None]
            self._places = deque([None] * len(self._places))
        for process in idle:
            process.kill()

    def _claim(self) -> Future[_Process | None]:
        place: Future[_Process | None] = Future()
        with self._lock:
            if self._places:
                place.set_result(self._places.pop())
            else:
                self._waiting.append(place)
        return place

    def _claim_blocking(self) -> _Process | None:
        place = self._claim()
        try:
            return place.result(timeout=self._limits.wall_seconds)
        except TimeoutError:
            self._unclaim(place)
            raise _busy() from None

    async def _claim_async(self) -> _Process | None:
        place = self._claim()
        if place.done():
            return place.result()
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                return await asyncio.wrap_future(place)
        except TimeoutError:
            self._unclaim(place)
            raise _busy() from None
        except asyncio.CancelledError:
            self._unclaim(place)
            raise

    def _unclaim(self, place: Future[_Process | None]) -> None:
        if not place.cancel() and not place.cancelled():  # it was given in the meantime
            self._release(place.result())

    def _drop(self, process: _Process | None) -> None:
        """Ends a process and frees its place. The system may take a while to free its memory; nobody waits for that."""
        if process is not None:
            process.kill()
        with self._lock:
            self._ending = [ending for ending in [*self._ending, process] if ending is not None and ending.alive]
        self._release(None)

    def _release(self, process: _Process | None) -> None:
        with self._lock:
            while self._waiting:
                waiting = self._waiting.popleft()
                if waiting.set_running_or_notify_cancel():
                    waiting.set_result(process)
                    return
            # The last process used is the next: its memory is warm, and the others' is left alone.
            self._places.append(process) if process is not None else self._places.appendleft(None)


def _busy() -> QueueFull:
    return QueueFull("other requests' chat templates are being rendered", retry_after=1.0)


@dataclasses.dataclass(frozen=True)
class _Reply:
    status: Status
    last: bool
    text: str

    def prompt(self) -> str:
        if self.status is Status.DONE:
            return self.text
        if self.status is Status.REFUSED:
            raise InvalidRequest(self.text, field="messages")
        raise ChatTemplateError(self.text)


class _Incoming:
    """A reply that arrives piece by piece; not trusted, as a template that got out of the sandbox may have sent it.

    Its text is decoded as it comes: nothing else runs while a long one is copied or decoded in one go.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head = b""
        self._left = 0  # bytes of the text that have not come
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._texts: list[str] = []

    def feed(self, data: bytes) -> _Reply | None:
        """The reply, once it is whole.

        Raises:
            ConnectionResetError: the process has ended, or this is not a reply.
            UnicodeDecodeError: it is not UTF-8.
        """
        if not data:
            raise ConnectionResetError
        if len(self._head) < REPLY.size:
            missing = REPLY.size - len(self._head)
            self._head, data = self._head + data[:missing], data[missing:]
            if len(self._head) < REPLY.size:
                return None
            status, _, self._left = REPLY.unpack(self._head)
            if status not in (Status.DONE, Status.REFUSED, Status.FAILED) or self._left > self._max_bytes:
                raise ConnectionResetError
        data = data[: self._left]
        self._left -= len(data)
        self._texts.append(self._decoder.decode(data, final=not self._left))
        if self._left:
            return None
        status, last, _ = REPLY.unpack(self._head)
        return _Reply(Status(status), last, "".join(self._texts))


class _Process:
    """A worker and the socket to it, for one exchange at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        try:
            self._process = LimitedProcess("llmjax.templating.worker", limits, environment=_environment())
        except OSError as error:
            raise TemplateProcessError(f"the process for chat templates cannot be started: {error}") from error
        self._socket = self._process.socket
        self._socket.settimeout(START_SECONDS)
        try:
            ready = self._socket.recv(REPLY.size, socket.MSG_WAITALL)
        except OSError:
            ready = b""
        if len(ready) < REPLY.size:
            code = self._process.exit_code()
            raise TemplateProcessError(f"the process for chat templates did not start (exit status {code})")

    @property
    def alive(self) -> bool:
        return self._process.alive

    def kill(self) -> None:
        self._process.kill()

    def exchange(self, request: bytes) -> _Reply:
        deadline = time.monotonic() + self._limits.wall_seconds
        incoming = _Incoming(4 * self._limits.chars)
        try:
            self._socket.settimeout(self._limits.wall_seconds)
            send_frame(self._socket, request)
            while (reply := incoming.feed(self._socket.recv(CHUNK))) is None:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        except TimeoutError:
            raise self._late() from None
        except (OSError, UnicodeDecodeError):
            raise self._died() from None
        return reply

    async def exchange_async(self, request: bytes) -> _Reply:
        loop = asyncio.get_running_loop()
        incoming = _Incoming(4 * self._limits.chars)
        try:
            self._socket.setblocking(False)
            async with asyncio.timeout(self._limits.wall_seconds):
                await loop.sock_sendall(self._socket, LENGTH.pack(len(request)))
                await loop.sock_sendall(self._socket, request)
                while (reply := incoming.feed(await loop.sock_recv(self._socket, CHUNK))) is None:
                    pass
        except TimeoutError:
            raise self._late() from None
        except (OSError, UnicodeDecodeError):
            raise self._died() from None
        return reply

    def _late(self) -> ChatTemplateError:
        return ChatTemplateError(f"chat template: rendering took more than {self._limits.wall_seconds:g} s")

    def _died(self) -> ChatTemplateError:
        if (code := self._process.exit_code()) == -signal.SIGPROF:
            reason = f"took more than {self._limits.cpu_seconds:g} s of computing time"
        else:
            reason = f"ended its process (exit status {code})"
        return ChatTemplateError(f"chat template: rendering {reason}")


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PYTHONPATH": python_path()}
