"""Messages between an engine's process and its client come out as they went in, however the socket cuts them."""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from llmjax.config import EngineConfig
from llmjax.constraints.thinking import ThinkingBudget, TokenMark
from llmjax.engine.clients.client import Control
from llmjax.engine.clients.wire import (
    Abandon,
    Channel,
    Failure,
    FromEngine,
    Question,
    Start,
    StepMessage,
    Submit,
    ToEngine,
)
from llmjax.engine.core.request import EngineOutput, EngineRequest, SequenceTimes
from llmjax.engine.core.stats import DraftCounts, StepStats
from llmjax.errors import CheckpointError, ConfigError, GenerationFailed, InvalidRequest, LLMJaxError, QueueFull
from llmjax.machine_share import MachineShare
from llmjax.outputs import Logprob
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.structured import StructuredOutputsParams


def passed(message: Any, incoming: Any) -> Any:
    """The message as the other side gets it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(ours, incoming).send(message)
        return next(Channel(theirs, incoming).receive())


ADAPTER = AdapterReference(name="support", path="/adapters/support", digest="ab" * 32, number=3)
NUMBERS = st.floats(allow_nan=False)
MAYBE = st.none() | NUMBERS
ENTRIES = st.dictionaries(
    st.integers(0, 2**31 - 1), st.builds(Logprob, NUMBERS, st.none() | st.integers(1, 2**20)), max_size=4
)
OUTPUTS = st.builds(
    EngineOutput,
    request_id=st.integers(0, 2**63 - 1),
    index=st.integers(0, 127),
    times=st.builds(
        SequenceTimes,
        arrival=NUMBERS,
        scheduled=MAYBE,
        first_token=MAYBE,
        last_token=MAYBE,
        num_preemptions=st.integers(0, 5),
    ),
    new_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5),
    new_logprobs=st.none() | st.lists(ENTRIES, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | ENTRIES, max_size=3),
    num_cached_tokens=st.integers(0, 2**20),
    finish_reason=st.sampled_from([None, "stop", "length", "abort"]),
)
STATS = StepStats(
    num_running=3,
    num_waiting=1,
    kv_usage=0.25,
    step_tokens=[3, 2],
    num_prompt_tokens=1,
    num_generation_tokens=4,
    time_to_first_tokens=[0.5],
    inter_token_latencies=[0.01, 0.02, 0.03],
    drafts=DraftCounts(num_drafts=2, num_draft_tokens=5, accepted_per_pos=[2, 0]),
)


@given(outputs=st.lists(OUTPUTS, max_size=6), stop=st.integers(0, 9))
def test_outputs_of_a_step(outputs: list[EngineOutput], stop: int) -> None:
    for output in outputs:
        output.stop_reason = stop if output.finish_reason == "stop" else None
    step = passed(StepMessage.of(outputs, [STATS]), FromEngine)
    assert step.outputs() == outputs
    assert step.stats == [STATS]


def test_an_output_with_an_error_keeps_its_type() -> None:
    error = GenerationFailed("the model's logits are not finite")
    times = SequenceTimes(arrival=1.0)
    output = EngineOutput(
        request_id=1, index=0, times=times, new_token_ids=[], finish_reason="error", stop_reason=None, error=error
    )
    (found,) = passed(StepMessage.of([output], []), FromEngine).outputs()
    assert type(found.error) is GenerationFailed and str(found.error) == str(error)
    assert found.finish_reason == "error"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            n=3,
            temperature=0.5,
            top_k=7,
            seed=-(2**63),
            max_tokens=None,
            min_tokens=2,
            stop_token_ids=[5, 6],
            logprobs=0,
            prompt_logprobs=2,
            logit_bias={4: -1.5, 9: 100},
            allowed_token_ids=range(50),
        ),
    ],
)
@pytest.mark.parametrize("salt", [None, "s", "\ud800 alone"])
def test_a_request(params: SamplingParams, salt: str | None) -> None:
    request = EngineRequest(
        request_id=2**40,
        prompt_token_ids=[0, 1, 2**31 - 1],
        params=params,
        max_tokens=9,
        stop_token_ids=frozenset({2, 5}),
        bad_words_token_ids=((1,), (2, 3)),
        priority=-4,
        cache_salt=salt,
        adaptation=Adaptation.of([ScaledAdapter(reference=ADAPTER, scale=scale) for scale in (0.5, -1.0)]),
        arrival_time=12.5,
    )
    assert passed(Submit.of(request), ToEngine).request() == request


def test_texts_of_a_request_stay_but_the_engine_knows_that_somebody_looks_for_them() -> None:
    params = SamplingParams(stop=["a", "\udfff"], bad_words=["never"], max_tokens=3)
    request = EngineRequest(request_id=0, prompt_token_ids=[1], params=params, max_tokens=3, stop_token_ids=frozenset())
    found = passed(Submit.of(request), ToEngine).request().params
    assert found.stop and found.clone(stop=(), bad_words=()) == params.clone(stop=(), bad_words=())
    assert set(found.stop).isdisjoint(params.stop) and not found.bad_words


THINKING = ThinkingBudget(
    tokens=7,
    inside=True,
    start=TokenMark(({5: 1},)),
    end=TokenMark(({3: 1, 2**17: 2}, {4: 2})),
    closing=(3, 4),
)


def test_a_form_goes_as_its_grammar() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    grammar = '{"grammars": [{"lark_grammar": "start: /a+/"}]}'
    request = EngineRequest(
        request_id=0,
        prompt_token_ids=[1],
        params=params,
        max_tokens=3,
        stop_token_ids=frozenset(),
        grammar=grammar,
        thinking=THINKING,
    )
    found = passed(Submit.of(request), ToEngine).request()
    assert (found.grammar, found.thinking) == (grammar, THINKING) and found.params == params.clone(
        structured_outputs=None
    )


def test_a_configuration() -> None:
    config = EngineConfig(
        model="m",
        hf_overrides={"rope": {"a": [1, None]}},
        kv_cache_memory_bytes=2**40,
        served_model_name=["a", "b"],  # sequences come as lists
        numa=[0],
        lora_modules=["a=/b"],
        lora=["c"],
        lora_scaled=["d:0.5"],
    )
    share = MachineShare(rank=1, count=3, host_memory=2**34)
    start = passed(Start(config, share, 20), ToEngine)
    assert (start.config, start.share) == (config, share)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CheckpointError("tensor a is missing"), "tensor a is missing"),
        (InvalidRequest("no", field="prompt"), "no"),
        (QueueFull("later", retry_after=7.0), "later"),
        (ConfigError("two\nlines"), "two\nlines"),
        (CheckpointError("name-\udcff: is not there"), "name-\\udcff: is not there"),
        (ValueError("wrong"), "wrong"),
    ],
)
def test_errors_are_of_the_same_class(error: LLMJaxError, message: str) -> None:
    times = SequenceTimes(arrival=0.0)
    output = EngineOutput(request_id=1, index=0, times=times, new_token_ids=[], finish_reason="error", error=error)
    assert str(passed(StepMessage.of([output], []), FromEngine).outputs()[0].error) == message
    found = Failure.of(error).error()
    assert type(found) is type(error) and str(found) == message
    assert {name: value for name, value in vars(found).items() if name != "__notes__"} == vars(error)
    assert "in the engine's process" in found.__notes__[0]


def test_errors_of_unknown_classes_name_them() -> None:
    class XlaRuntimeError(RuntimeError):
        pass

    for error in (XlaRuntimeError("out of memory"), KeyError("key"), UnicodeDecodeError("utf-8", b"", 0, 1, "no")):
        found = Failure.of(error).error()
        assert type(found) is RuntimeError and str(found) == f"{type(error).__name__}: {error}"


def test_messages_are_put_together_from_pieces_and_told_apart() -> None:
    ours, theirs = socket.socketpair()
    messages = [Abandon(1, None), Question(2, Control.KV_STATS), Abandon(3, 4)]
    data = b"".join(Channel(ours, ToEngine).encode(message) for message in messages)
    with theirs:
        received = Channel(theirs, ToEngine).receive()
        with ours:

            def drip() -> None:
                for byte in data:
                    ours.sendall(bytes([byte]))

            thread = threading.Thread(target=drip)
            thread.start()
            assert [next(received) for _ in messages] == messages
            thread.join()
            ours.sendall(data[:-1])
        assert list(received) == messages[:-1]  # then the other side had gone


def test_what_is_not_a_message_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(ours, FromEngine).send(Question(2, Control.PING))
        with pytest.raises(msgspec.DecodeError):
            next(Channel(theirs, FromEngine).receive())


class Dripping:
    """A socket that gives one byte at a time, with each of which time passes."""

    def __init__(self, data: bytes, *, seconds: float) -> None:
        self._data, self._seconds = data, seconds
        self.now = 0.0
        self.timeouts: list[float | None] = []

    def settimeout(self, seconds: float | None) -> None:
        self.timeouts.append(seconds)

    def recv(self, _: int) -> bytes:
        self.now += self._seconds
        part, self._data = self._data[:1], self._data[1:]
        return part


def dripping(messages: int, *, seconds: float, limit: float | None) -> tuple[Dripping, Channel]:
    channel = Channel(socket.socket(), Question)
    encoded = channel.encode(Question(1, Control.KV_STATS))
    channel.connection.close()
    source = Dripping(encoded * messages, seconds=seconds / len(encoded))
    return source, Channel(source, Question, seconds=limit, clock=lambda: source.now)  # type: ignore[arg-type]


def test_a_message_has_one_deadline_however_it_comes() -> None:
    """A message that is cut into bytes may not take longer than one that comes whole."""
    source, channel = dripping(2, seconds=9.0, limit=5.0)
    with pytest.raises(TimeoutError, match="a message has not come within 5 s"):
        next(channel.receive())
    assert source.now < 6.0
    assert source.timeouts == sorted(source.timeouts, reverse=True) and source.timeouts[0] == 5.0


def test_each_message_has_its_own_deadline() -> None:
    source, channel = dripping(3, seconds=4.0, limit=5.0)
    assert len(list(channel.receive())) == 3 and source.now > 12.0


def test_without_a_deadline_a_message_may_take_any_time() -> None:
    source, channel = dripping(2, seconds=9e9, limit=None)
    assert len(list(channel.receive())) == 2 and source.timeouts == []
