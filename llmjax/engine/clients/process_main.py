"""An engine in its own process, which ends with its socket: ``python -m llmjax.engine.clients.process_main FD``."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from llmjax.collector import permanent, put_aside
from llmjax.engine.clients.client import Control, log_stacks
from llmjax.engine.clients.wire import (
    DUMP_STACKS,
    Abandon,
    Answer,
    Channel,
    Failed,
    Failure,
    Leave,
    Located,
    Log,
    Measured,
    Proceed,
    Question,
    Ready,
    ShowStacks,
    StacksShown,
    Start,
    StepMessage,
    Submit,
    ToEngine,
    printable,
)
from llmjax.engine.core.stats import RequestStats, StepStats

if TYPE_CHECKING:
    from llmjax.engine.clients.inbox import Inbox
    from llmjax.engine.clients.loop import EngineLoop
    from llmjax.engine.core.request import EngineOutput
    from llmjax.engine.need import Need


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the parent's affair; it may have requests to finish
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.register(DUMP_STACKS, file=sys.stderr, all_threads=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output belongs to the parent process
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), ToEngine)
    messages = channel.receive()
    start = next(messages)
    logging.basicConfig(level=start.log_level, handlers=[_Records(channel)])
    inbox: Future[Inbox] = Future()
    admitted = threading.Event()
    listening = (messages, channel, inbox, admitted)
    threading.Thread(target=_listen, args=listening, name="engine-inbox", daemon=True).start()
    try:
        _serve(start, channel, inbox, admitted)
    except Exception as error:
        _end_by(error, channel)
    sys.stderr.flush()
    os._exit(0)  # threads may be inside XLA, and are not waited for


def _end_by(error: Exception, channel: Channel) -> NoReturn:
    """Ends the process, whatever it computes or waits for."""
    with suppress(OSError):  # the parent has ended
        channel.send(Failed(Failure.of(error)))
    sys.stderr.flush()
    os._exit(1)


def _serve(start: Start, channel: Channel, ready: Future[Inbox], admitted: threading.Event) -> None:
    with permanent():
        from llmjax.engine.build import build_engine
        from llmjax.engine.clients.inbox import Inbox
        from llmjax.engine.clients.loop import EngineLoop, log_end
        from llmjax.engine.description import info_of
        from llmjax.engine.ranks.lifeline import Lifeline

    def admit(need: Need) -> None:
        channel.send(Measured(need))
        admitted.wait()

    engine = build_engine(
        start.config,
        start.share,
        located=lambda path: channel.send(Located(str(path))),
        admit=admit if start.asks else None,
    )
    sender = _Sender(channel)
    engine.loggers.append(sender)
    loop = EngineLoop(engine)
    ending = threading.Lock()

    def end(error: Exception) -> NoReturn:
        ending.acquire()  # never released: only the first caller goes on
        log_end(error)
        _end_by(error, channel)

    engine.runner.watch(end)  # the loop may wait for devices that wait for the process that has gone
    info = info_of(engine)
    channel.send(Ready(info))
    ready.set_result(Inbox(loop, start.config, info))
    Lifeline([channel.connection])  # streams end at once when this process is killed
    try:
        loop.run(sender.deliver)
        engine.close(wait=False)  # other ranks are told to leave
    except Exception as error:
        end(error)


def _listen(messages: Iterator[Any], channel: Channel, ready: Future[Inbox], admitted: threading.Event) -> None:
    """Hands messages to the loop; without a parent the process ends at once, whatever it is doing."""
    from llmjax.engine.clients.loop import Abort, Stop

    try:
        for message in messages:
            if isinstance(message, Proceed):
                admitted.set()
                continue
            inbox = ready.result()
            match message:
                case Submit():
                    inbox.submit(message.request())
                case Abandon():
                    inbox.abort(Abort(message.request_id, message.index))
                case Question():
                    _answer(inbox.loop, message, channel)
                case ShowStacks():
                    log_stacks()
                    channel.send(StacksShown())
                case Leave():
                    inbox.loop.send(Stop())
    finally:
        os._exit(1)


def _answer(loop: EngineLoop, question: Question, channel: Channel) -> None:
    def answer(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            channel.send(Answer(question.number, failure=Failure.of(error)))
        else:
            if question.control is Control.WAIT_READY:
                put_aside()
            channel.send(Answer(question.number, result=future.result()))

    loop.ask(question.control, question.adapter).add_done_callback(answer)


class _Sender:
    """Sends what a step brought; a ``StatLogger``, so that its counts go along."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stats: list[StepStats] = []

    def deliver(self, outputs: list[EngineOutput]) -> None:
        if outputs or self._stats:
            self._channel.send(StepMessage.of(outputs, self._stats))
            self._stats = []

    def record_step(self, stats: StepStats) -> None:
        self._stats.append(stats)

    def record_request(self, stats: RequestStats) -> None: ...

    def record_rejection(self, reason: str) -> None: ...


class _Records(logging.Handler):
    """Sends log records to the parent, which knows what to do with them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._format = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            trace = printable(self._format.formatException(record.exc_info)) if record.exc_info else None
            place = (record.pathname, record.lineno)
            self._channel.send(Log(record.name, record.levelno, *place, printable(record.getMessage()), trace))
        except OSError:
            pass  # the parent has ended
        except Exception:
            self.handleError(record)


if __name__ == "__main__":
    main()
