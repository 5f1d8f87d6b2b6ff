"""Publishes messages to subscribers over ZeroMQ, and replays them to subscribers that have missed some.

A message has three frames: topic, number (8 bytes, big-endian, from 0 on), payload. A replay request to the ROUTER
socket is the number to begin with; each answer is an empty frame, number and payload, and the last one has the number
-1 and no payload.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

import msgspec

from llmjax.errors import ConfigError
from llmjax.kv_events import SETTING, KVEventsConfig

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
NUMBER_BYTES = 8
LINGER_MS = 1000  # how long the last messages may take to leave the process


class EventPublisher:
    """Sends messages on a thread of its own.

    Args:
        config: the endpoints, and how many messages are kept.
        rank: the engine's rank, which is added to the port of each endpoint.

    Raises:
        ConfigError: pyzmq is not there, or an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig, *, rank: int = 0) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ConfigError(f"{SETTING} needs pyzmq", hint="pip install 'llmjax[kv-events]'") from error
        self._zmq = zmq
        self.rank = rank
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._lost = 0
        try:
            published = self._context.socket(zmq.PUB)
            published.set_hwm(config.hwm)
            _open(published, endpoint_of(config.endpoint, rank))
            replay = None
            if config.replay_endpoint is not None:
                replay = self._context.socket(zmq.ROUTER)
                replay.set_hwm(config.buffer_steps + 1)  # one who asks gets all of them
                _open(replay, endpoint_of(config.replay_endpoint, rank), always_bind=True)
            # A pair of sockets connects the two threads, because the publishing thread can wait for a socket.
            waiting, self._queue = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
            waiting.set_hwm(1)
            self._queue.set_hwm(config.max_queue_size)
            waiting.bind("inproc://events")
            self._queue.connect("inproc://events")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{SETTING}: {error}") from error
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._thread = threading.Thread(
            target=_send,
            args=(waiting, published, replay, config.topic.encode(), buffer),
            name="kv-events",
            daemon=True,
        )
        self._thread.start()

    def publish(self, message: Any) -> None:
        """Sends a message as MessagePack; never waits. If too many wait already it is lost, with a warning for the
        first one."""
        try:
            self._queue.send(self._encoder.encode(message), self._zmq.NOBLOCK)
        except self._zmq.Again:
            self._lost += 1
            if self._lost == 1:
                logger.warning("%s: events come faster than they can be sent, and are lost", SETTING)

    def close(self) -> None:
        """Sends the waiting messages, for a second at most; a second call does nothing."""
        if not self._queue.closed:
            self._queue.send(b"")  # no message is empty
            self._thread.join(2 * LINGER_MS / 1000)
            self._queue.close(0)
            if not self._thread.is_alive():
                self._context.term()


def endpoint_of(endpoint: str, rank: int) -> str:
    """The endpoint of an engine: its rank is added to the port of a TCP endpoint, and appended to other names."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"


def _open(socket: Any, endpoint: str, *, always_bind: bool = False) -> None:
    """Binds to an endpoint of this machine, or connects to one that has a host, as vLLM does."""
    import zmq

    binds = always_bind or "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{SETTING}: {endpoint}: {error}") from error


def _send(waiting: Any, published: Any, replay: Any, topic: bytes, buffer: deque[tuple[bytes, bytes]]) -> None:
    """Runs on the thread, which alone uses the sockets, because ZeroMQ sockets are not thread-safe."""
    import zmq

    poller = zmq.Poller()
    for socket in (waiting, replay):
        if socket is not None:
            poller.register(socket, zmq.POLLIN)
    count = 0
    while True:
        ready = dict(poller.poll())
        if waiting not in ready:  # a subscriber asks for messages that it has missed
            _replay(replay, buffer)
            continue
        if not (payload := waiting.recv()):
            break
        number = count.to_bytes(NUMBER_BYTES, "big")
        published.send_multipart((topic, number, payload))
        buffer.append((number, payload))
        count += 1
    for socket in (waiting, replay, published):
        if socket is not None:
            socket.close(LINGER_MS)


def _replay(replay: Any, buffer: deque[tuple[bytes, bytes]]) -> None:
    """Answers a replay request with all kept messages from a number on."""
    frames = replay.recv_multipart()
    if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
        logger.warning("%s: a replay request is an empty frame and a number of 8 bytes; one has another form", SETTING)
        return
    client, _, first = frames
    for number, payload in buffer:
        if number >= first:
            replay.send_multipart((client, b"", number, payload))
    replay.send_multipart((client, b"", END, b""))
