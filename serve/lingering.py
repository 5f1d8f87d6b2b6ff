"""The end of a connection whose client still sends (RFC 9112, 9.6): closed at once, it would be reset, and the client
might never see the last answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

MOST_DISCARDED = 32 * 2**20  # bytes of what nobody will read; a client that is cut off while it sends sees no answer


class LingeringTransport(asyncio.Transport):
    """A transport that, when it is closed while more is to come, first says that it says no more, and reads on.

    Args:
        transport: the system's.
        sending: whether more is to come.
        seconds: after which it is closed in any case.
    """

    def __init__(self, transport: asyncio.Transport, *, sending: Callable[[], bool], seconds: float) -> None:
        super().__init__()
        self._transport = transport
        self._sending = sending
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self.discarded = 0
        # Those that are called for each token.
        self.write = transport.write  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.get_write_buffer_size = transport.get_write_buffer_size  # type: ignore[method-assign]

    @property
    def lingers(self) -> bool:
        """Whether it is only read to keep the last answer alive: see ``discard``."""
        return self._timer is not None

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """At once, if called again or nothing is to come."""
        if self.is_closing() or not self._sending():
            self.stop()
            return
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.stop)
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        self._transport.resume_reading()

    def stop(self) -> None:
        """Closes it at once."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()

    def abort(self) -> None:
        """Closes it at once, although not all has been sent."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()

    def discard(self, size: int) -> None:
        """Takes note of bytes that have come for nobody; too many close it."""
        self.discarded += size
        if self.discarded > MOST_DISCARDED:
            self.stop()


class HeldFlow(FlowControl):
    """Uvicorn's flow control, which does not read on while what has come waits to be parsed."""

    held = False

    def hold(self, held: bool) -> None:
        """Whether to wait."""
        goes_on = self.held and not held
        self.held = held
        if held:
            self.pause_reading()
        elif goes_on:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()
