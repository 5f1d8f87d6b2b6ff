"""Messages between an engine's process and its client: length-prefixed MessagePack over a socket.

All outputs of a step are one message of columns: one object for each would cost more than the rest of the step.
"""

from __future__ import annotations

import builtins
import itertools
import signal
import socket
import struct
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from llmjax.adapters.reference import Adaptation, AdapterReference
from llmjax.config import EngineConfig
from llmjax.constraints.thinking import ThinkingBudget
from llmjax.engine.clients.client import Control
from llmjax.engine.core.media import PromptMedia
from llmjax.engine.core.request import EngineOutput, EngineRequest, PooledRequest, SequenceTimes, Vectors
from llmjax.engine.core.stats import StepStats
from llmjax.engine.info import EngineInfo
from llmjax.engine.need import Need
from llmjax.errors import GenerationFailed, LLMJaxError
from llmjax.machine_share import MachineShare
from llmjax.outputs import Logprob, TokenLogprobs
from llmjax.sampling.params import SamplingParams

DUMP_STACKS = signal.SIGUSR1  # where the threads stand, of a process that no longer takes messages
LENGTH = struct.Struct("<I")  # before each message: its bytes
CHUNK = 2**18


def encode_array(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """A NumPy array in a message: the name of its dtype, its shape, its bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} cannot be in a message")


def decode_array(kind: Any, value: Any) -> np.ndarray:
    """The read-only array that `encode_array` has encoded.

    Raises:
        TypeError, ValueError: it is not one; msgspec makes DecodeError of them.
    """
    name, shape, data = value
    return np.frombuffer(data, np.dtype(name)).reshape(shape)


class Message(msgspec.Struct, array_like=True):
    """A message, or a part of one."""


class Failure(Message):
    """An exception.

    Args:
        kind: name of its class.
        attributes: what an ``LLMJaxError`` has beside its message.
        trace: for debugging.
    """

    kind: str
    message: str
    attributes: dict[str, Any]
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        fields = vars(error) if isinstance(error, LLMJaxError) else {}
        attributes = {name: value for name, value in fields.items() if isinstance(value, str | int | float | None)}
        trace = "".join(traceback.format_exception(error))
        message = error.message if isinstance(error, LLMJaxError) else str(error)
        return cls(kind=type(error).__name__, message=printable(message), attributes=attributes, trace=printable(trace))

    def error(self) -> Exception:
        """The exception, of its own class if that is llmjax's or Python's, else a RuntimeError that names the class."""
        known = {cls.__name__: cls for cls in _subclasses(LLMJaxError)}
        if self.kind in known:
            ours = known[self.kind]
            error: Exception = ours.__new__(ours, self.message)
            vars(error).update(self.attributes)
        else:
            error = _builtin(self.kind, self.message) or RuntimeError(f"{self.kind}: {self.message}")
        error.add_note(f"in the engine's process:\n{self.trace}")
        return error


class Start(Message, tag="start"):
    """To the engine, first."""

    config: EngineConfig
    share: MachineShare  # this engine's part of the machine
    log_level: int  # level of the least severe log record to send
    asks: bool = False  # whether it says what it needs, and waits for Proceed before it takes it


class Submit(Message, tag="submit"):
    """To the engine: a request. It has no texts: they have become tokens, or concern the client alone."""

    request_id: int
    prompt: bytes  # int32
    params: SamplingParams
    watched: bool  # for stop strings, so that each token is an output of its own
    max_tokens: int
    stop_token_ids: list[int]
    bad_words_token_ids: list[list[int]]
    grammar: str | None
    thinking: ThinkingBudget | None
    pooling: PooledRequest | None
    adaptation: Adaptation | None
    media: PromptMedia | None
    priority: int
    cache_salt: bytes | None
    arrival_time: float

    @classmethod
    def of(cls, request: EngineRequest) -> Submit:
        params, salt = request.params, request.cache_salt
        return cls(
            request_id=request.request_id,
            prompt=array("i", request.prompt_token_ids).tobytes(),
            params=replace(params, stop=(), bad_words=(), structured_outputs=None)
            if params.stop or params.bad_words or params.structured_outputs
            else params,
            watched=bool(params.stop),
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop_token_ids),
            bad_words_token_ids=[list(word) for word in request.bad_words_token_ids],
            grammar=request.grammar,
            thinking=request.thinking,
            pooling=request.pooling,
            adaptation=request.adaptation,
            media=request.media,
            priority=request.priority,
            cache_salt=None if salt is None else salt.encode(errors="surrogatepass"),
            arrival_time=request.arrival_time,
        )

    def request(self) -> EngineRequest:
        salt = self.cache_salt
        return EngineRequest(
            request_id=self.request_id,
            prompt_token_ids=array("i", self.prompt).tolist(),
            params=replace(self.params, stop=" ") if self.watched else self.params,
            max_tokens=self.max_tokens,
            stop_token_ids=frozenset(self.stop_token_ids),
            bad_words_token_ids=tuple(tuple(word) for word in self.bad_words_token_ids),
            grammar=self.grammar,
            thinking=self.thinking,
            pooling=self.pooling,
            adaptation=self.adaptation,
            media=self.media,
            priority=self.priority,
            cache_salt=None if salt is None else salt.decode(errors="surrogatepass"),
            arrival_time=self.arrival_time,
        )


class Abandon(Message, tag="abandon"):
    """To the engine: a request, or one of its continuations, is to end."""

    request_id: int
    index: int | None


class Question(Message, tag="question"):
    """To the engine; an ``Answer`` of the same number comes back."""

    number: int
    control: Control
    adapter: AdapterReference | None = None


class Leave(Message, tag="leave"):
    """To the engine, last."""


class ShowStacks(Message, tag="show stacks"):
    """To the engine: the log is to have where its threads stand."""


class StacksShown(Message, tag="stacks shown"):
    """From the engine, after that."""


class Located(Message, tag="located"):
    """From the engine, once it knows where the model is: others may read what lies beside the weights."""

    path: str


class Measured(Message, tag="measured"):
    """From an engine that asks, before it takes what it needs."""

    need: Need


class Proceed(Message, tag="proceed"):
    """To an engine that has asked: it may take what it needs."""


class Ready(Message, tag="ready"):
    """From the engine, once the model is loaded."""

    info: EngineInfo


class Log(Message, tag="log"):
    """From the engine: a log record."""

    name: str
    level: int
    path: str
    line: int
    message: str
    trace: str | None


class Entries(Message):
    """Log-probabilities of some tokens and of those that were likely in their places, one after the other."""

    counts: list[int]  # entries of each token; -1: there are none
    ids: list[int]
    logprobs: list[float]
    ranks: list[int | None]

    @classmethod
    def of(cls, tokens: Sequence[TokenLogprobs | None]) -> Entries:
        found = [(token, entry) for entries in tokens if entries is not None for token, entry in entries.items()]
        return cls(
            counts=[-1 if entries is None else len(entries) for entries in tokens],
            ids=[token for token, _ in found],
            logprobs=[entry.logprob for _, entry in found],
            ranks=[entry.rank for _, entry in found],
        )

    def tokens(self) -> list[TokenLogprobs | None]:
        rest = zip(self.ids, self.logprobs, self.ranks, strict=True)
        return [
            None if count < 0 else {token: Logprob(value, rank) for token, value, rank in itertools.islice(rest, count)}
            for count in self.counts
        ]


class Floats(Message):
    """An array of f32."""

    shape: list[int]
    values: bytes

    @classmethod
    def of(cls, vectors: Vectors) -> Floats:
        return cls(shape=list(vectors.shape), values=vectors.tobytes())

    def vectors(self) -> Vectors:
        return np.frombuffer(self.values, np.float32).reshape(self.shape)


class Last(Message):
    """How a continuation ended."""

    finish_reason: str
    stop_reason: int | None
    failure: Failure | None


class StepMessage(Message, tag="step"):
    """From the engine: the outputs of a step. Columns have one entry for each output; rare fields are listed with the
    index of their output."""

    request_ids: list[int]
    indexes: list[int]
    counts: list[int]  # numbers of new tokens
    tokens: list[int]
    cached: list[int]
    arrivals: list[float]
    scheduled: list[float | None]
    first_tokens: list[float | None]
    last_tokens: list[float | None]
    preemptions: list[int]
    ends: dict[int, Last]
    logprobs: dict[int, Entries]
    prompt_logprobs: dict[int, Entries]
    vectors: dict[int, Floats]
    stats: list[StepStats]

    @classmethod
    def of(cls, outputs: Sequence[EngineOutput], stats: list[StepStats]) -> StepMessage:
        times = [output.times for output in outputs]
        return cls(
            request_ids=[output.request_id for output in outputs],
            indexes=[output.index for output in outputs],
            counts=[len(output.new_token_ids) for output in outputs],
            tokens=[token for output in outputs for token in output.new_token_ids],
            cached=[output.num_cached_tokens for output in outputs],
            arrivals=[time.arrival for time in times],
            scheduled=[time.scheduled for time in times],
            first_tokens=[time.first_token for time in times],
            last_tokens=[time.last_token for time in times],
            preemptions=[time.num_preemptions for time in times],
            ends={
                place: Last(
                    output.finish_reason,
                    output.stop_reason,
                    None if output.error is None else Failure.of(output.error),
                )
                for place, output in enumerate(outputs)
                if output.finish_reason is not None
            },
            logprobs={
                place: Entries.of(output.new_logprobs)
                for place, output in enumerate(outputs)
                if output.new_logprobs is not None
            },
            prompt_logprobs={
                place: Entries.of(output.prompt_logprobs)
                for place, output in enumerate(outputs)
                if output.prompt_logprobs is not None
            },
            vectors={
                place: Floats.of(output.vectors) for place, output in enumerate(outputs) if output.vectors is not None
            },
            stats=stats,
        )

    def outputs(self) -> list[EngineOutput]:
        times = [
            SequenceTimes(
                arrival=arrival, scheduled=scheduled, first_token=first, last_token=last, num_preemptions=preemptions
            )
            for arrival, scheduled, first, last, preemptions in zip(
                self.arrivals, self.scheduled, self.first_tokens, self.last_tokens, self.preemptions, strict=True
            )
        ]
        tokens = iter(self.tokens)
        outputs = [
            EngineOutput(
                request_id=request_id,
                index=index,
                times=time,
                new_token_ids=list(itertools.islice(tokens, count)),
                num_cached_tokens=cached,
            )
            for request_id, index, count, cached, time in zip(
                self.request_ids, self.indexes, self.counts, self.cached, times, strict=True
            )
        ]
        for place, last in self.ends.items():
            output = outputs[place]
            output.finish_reason, output.stop_reason = last.finish_reason, last.stop_reason
            if last.failure is not None:
                error = last.failure.error()
                output.error = error if isinstance(error, LLMJaxError) else GenerationFailed(str(error))
        for place, entries in self.logprobs.items():
            outputs[place].new_logprobs = [token for token in entries.tokens() if token is not None]
        for place, entries in self.prompt_logprobs.items():
            outputs[place].prompt_logprobs = entries.tokens()
        for place, floats in self.vectors.items():
            outputs[place].vectors = floats.vectors()
        return outputs


class Answer(Message, tag="answer"):
    """From the engine, to a ``Question``."""

    number: int
    result: Any = None
    failure: Failure | None = None


class Failed(Message, tag="failed"):
    """From the engine, last: why it ends, if not because it was told to."""

    failure: Failure


ToEngine = Start | Proceed | Submit | Abandon | Question | ShowStacks | Leave
FromEngine = Located | Measured | Ready | Log | StepMessage | Answer | StacksShown | Failed


class Channel:
    """A connected socket that carries messages. One thread may receive, any may send.

    Args:
        incoming: union of the messages that come.
        limit: bytes of the longest one.
        seconds: time limit for a whole message, in however many pieces: from the call that waits for it until it is
            there, or until it is sent. Only one thread uses the channel then. None: there is no limit.
        clock: seconds.

    Attributes:
        limit: may be changed between two messages.
        seconds: likewise.
    """

    def __init__(
        self,
        connection: socket.socket,
        incoming: Any,
        *,
        limit: int = 2**32 - 1,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.seconds = seconds
        self._clock = clock
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
        self._decoder = msgspec.msgpack.Decoder(incoming, dec_hook=decode_array)
        self._lock = threading.Lock()

    @property
    def connection(self) -> socket.socket:
        """What carries them."""
        return self._socket

    @property
    def address(self) -> str:
        """The address of this side, where the connection is a network connection."""
        address: str = self._socket.getsockname()[0]
        return address

    def encode(self, message: Message) -> bytes:
        """The message as it goes over the socket."""
        data = bytearray(LENGTH.size)
        self._encoder.encode_into(message, data, LENGTH.size)
        LENGTH.pack_into(data, 0, len(data) - LENGTH.size)
        return bytes(data)

    def send(self, message: Message) -> None:
        """Blocks until the socket has taken it.

        Raises:
            OSError: the other side has gone, or takes too long.
        """
        self.send_encoded(self.encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Sends a message that ``encode`` has made, as ``send`` does."""
        with self._lock:
            if self.seconds is not None:
                self._socket.settimeout(self.seconds)  # time limit for the whole message
            self._socket.sendall(data)

    def end(self) -> None:
        """Says to the other side that nothing more comes."""
        with suppress(OSError):  # it has gone
            self._socket.shutdown(socket.SHUT_WR)

    def receive(self) -> Iterator[Any]:
        """Messages until the other side has gone.

        Raises:
            OSError: the connection broke, or a message takes too long.
            msgspec.DecodeError: what came is not a message.
        """
        data, since = bytearray(), self._clock()
        while part := self._received(since):
            data += part
            at = 0
            while len(data) - at >= LENGTH.size:
                length = LENGTH.unpack_from(data, at)[0]
                if length > self.limit:
                    raise msgspec.DecodeError(f"a message of {length} bytes, where {self.limit} are the most")
                end = at + LENGTH.size + length
                if len(data) < end:
                    break
                yield self._decoder.decode(memoryview(data)[at + LENGTH.size : end])
                at, since = end, self._clock()
            del data[:at]

    def _received(self, since: float) -> bytes:
        """More bytes of a message, for which the channel has waited since ``since``."""
        if self.seconds is not None:
            left = since + self.seconds - self._clock()
            if left <= 0:
                raise TimeoutError(f"a message has not come within {self.seconds:g} s")
            self._socket.settimeout(left)
        return self._socket.recv(CHUNK)


def printable(text: str) -> str:
    """The text, with escapes for what is not Unicode, such as bytes of a file's name."""
    return text.encode(errors="backslashreplace").decode()


def _subclasses(cls: type[LLMJaxError]) -> Iterable[type[LLMJaxError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)


def _builtin(name: str, message: str) -> Exception | None:
    cls = getattr(builtins, name, None)
    if not isinstance(cls, type) or not issubclass(cls, Exception):
        return None
    try:
        error = cls(message)
    except TypeError:  # it wants more
        return None
    return error if str(error) == message else None
