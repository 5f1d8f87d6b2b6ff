"""What others are told of the prefix cache: that it is true, its form, and that it arrives."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.core.page_pool import PageKey
from llmjax.engine.tiers.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvents,
    EventBatch,
    block_hash,
)
from llmjax.engine.tiers.publisher import EventPublisher, endpoint_of
from llmjax.errors import ConfigError
from llmjax.kv_events import KVEventsConfig
from llmjax.models.layers.state import AllTokens, LastState, LastTokens
from tests.checkpoints import GOLDEN
from tests.engine.core.test_scheduler import SimulatedEngine, adaptation, check_results, request, run, shapes, workloads

LLAMA = GOLDEN / "llama"
ALL = AllTokens()


class Listener:
    """Knows what it has been told, and the tokens of each page."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[int, ...]] = {}  # by group and hash

    def take(self, events: list[Any]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    assert event.medium == "GPU" and event.lora_id is None and event.group_idx is not None
                    size = event.block_size
                    assert len(event.token_ids) == size * len(event.block_hashes)
                    for at, page in enumerate(event.block_hashes):
                        assert (event.group_idx, page) not in self.known, "stored twice"
                        tokens = event.token_ids[at * size : (at + 1) * size]
                        self.known[event.group_idx, page] = tuple(tokens)
                case BlockRemoved():
                    assert event.medium == "GPU" and event.group_idx is not None
                    for page in event.block_hashes:
                        del self.known[event.group_idx, page]
                case AllBlocksCleared():
                    self.known.clear()


@settings(max_examples=100)
@given(st.data())
@pytest.mark.slow
def test_who_listens_knows_what_is_cached(data: st.DataObject) -> None:
    shape = replace(data.draw(shapes()), share_prefixes=True)
    listener = Listener()

    class Checked:
        """In place of a publisher."""

        rank = 0

        def publish(self, batch: EventBatch) -> None:
            listener.take(batch.events)
            cached = {
                (group, block_hash(key.digest)): key.tokens
                for group, pool in enumerate(engine.kv.pools)
                for key in pool._keys
                if key is not None
            }
            assert listener.known == cached

        def close(self) -> None:
            return

    events = CacheEvents(Checked(), shape.spans, latent=False, page_size=shape.page_size)
    engine = SimulatedEngine(shape, listener=events)
    arrivals = data.draw(workloads(shape))
    check_results(arrivals, run(engine, arrivals, max_steps=10_000))
    assert events.take() == []
    engine.reset_prefix_cache()
    assert listener.known == {}


@dataclass
class Sent:
    """What a publisher was given."""

    rank: int = 3
    batches: list[EventBatch] = field(default_factory=list)
    closed: bool = False

    def publish(self, message: EventBatch) -> None:
        self.batches.append(message)

    def close(self) -> None:
        self.closed = True


plain = request("p", [1, 2], max_tokens=1)
salted = request("s", [1, 2], max_tokens=1, cache_salt="s")
adapted = request("a", [1, 2], max_tokens=1, cache_salt="s", adaptation=adaptation("b"))


def test_events_are_published_together() -> None:
    sent = Sent()
    events = CacheEvents(sent, [ALL], latent=False, page_size=2)
    events.publish()
    assert sent.batches == []  # nothing has happened
    key = PageKey.chain(b"root", (1, 2))
    events.stored(0, key, parent=None, request=plain)
    events.removed(0, key)
    events.publish()
    (batch,) = sent.batches
    assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved]
    assert batch.data_parallel_rank == 3
    events.publish()
    events.close()
    assert len(sent.batches) == 1 and sent.closed


def test_pages_that_follow_each_other_are_one_event() -> None:
    events = CacheEvents(Sent(), [ALL, LastTokens(6), LastState()], latent=True, page_size=2)
    first = PageKey.chain(b"root", (1, 2))
    second = PageKey.chain(first.digest, (3, 4))
    other = PageKey.chain(b"root", (5, 6))
    events.stored(0, first, parent=None, request=salted)
    events.stored(0, second, parent=first.digest, request=salted)
    events.stored(0, other, parent=None, request=plain)
    events.stored(1, first, parent=None, request=plain)
    events.stored(2, second, parent=first.digest, request=plain)
    one, two, three, four = events.take()
    assert isinstance(one, BlockStored)
    assert one.block_hashes == [int.from_bytes(key.digest[8:], "big") for key in (first, second)]
    assert one.parent_block_hash is None
    assert one.token_ids == [1, 2, 3, 4]
    assert one.extra_keys == [("s",), None]
    assert one.kv_cache_spec_kind == "mla_attention"
    assert isinstance(two, BlockStored) and two.token_ids == [5, 6] and two.extra_keys is None
    assert isinstance(three, BlockStored)
    assert (three.group_idx, three.kv_cache_spec_kind, three.kv_cache_spec_sliding_window) == (1, "sliding_window", 6)
    assert isinstance(four, BlockStored)
    assert (four.kv_cache_spec_kind, four.parent_block_hash) == ("mamba", block_hash(first.digest))
    events.removed(0, first)
    events.removed(0, second)
    events.removed(1, first)
    assert [(event.group_idx, len(event.block_hashes)) for event in events.take()] == [(0, 2), (1, 1)]  # type: ignore[union-attr]
    events.removed(0, first)
    events.cleared()
    assert events.take() == [AllBlocksCleared()]
    assert events.take() == []


def test_pages_name_the_adapter_that_they_were_computed_with() -> None:
    events = CacheEvents(Sent(), [ALL], latent=False, page_size=2)
    first = PageKey.chain(b"root", (1, 2))
    second = PageKey.chain(first.digest, (3, 4))
    events.stored(0, first, parent=None, request=adapted)
    events.stored(0, second, parent=first.digest, request=adapted)
    (event,) = events.take()
    assert isinstance(event, BlockStored)
    assert (event.lora_id, event.lora_name) == (ord("b"), "b")
    assert event.extra_keys == [("lora:b", "s"), ("lora:b",)]


def test_messages_look_as_vllms() -> None:
    """The keys and their order as vLLM 0.26 sends them; what has its default is left out."""
    events = CacheEvents(Sent(), [ALL], latent=False, page_size=2)
    key = PageKey(bytes(range(16)), (7, 8))
    events.stored(0, key, parent=None, request=plain)
    events.removed(0, key)
    taken = [*events.take(), AllBlocksCleared()]
    page = 0x08090A0B0C0D0E0F
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, taken, 3))) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [page],
                "parent_block_hash": None,
                "token_ids": [7, 8],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [page], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable_kv_events": True}, "unknown key 'enable_kv_events'; did you mean enable_kv_cache_events?"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events must be true or false, not 1"),
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, "publisher must be zmq or null, not 'kafka'"),
        ({"publisher": "zmq"}, "publisher zmq needs enable_kv_cache_events"),
        ({"enable_kv_cache_events": True, "hwm": 0}, "hwm must be an integer of at least 1, not 0"),
        ({"enable_kv_cache_events": True, "endpoint": "here"}, "endpoint must be like tcp://*:5557"),
        ({"enable_kv_cache_events": True, "replay_endpoint": 5}, "replay_endpoint must be like"),
        ({"enable_kv_cache_events": True, "topic": 5}, "topic must be a string, not 5"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(kv_events_config=values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_are_vllms() -> None:
    assert EngineConfig().kv_events is None
    assert EngineConfig(kv_events_config={"endpoint": "tcp://*:1"}).kv_events is None
    assert EngineConfig(kv_events_config={"enable_kv_cache_events": True, "publisher": "null"}).kv_events is None
    found = EngineConfig(kv_events_config={"enable_kv_cache_events": True, "topic": "kv@pod@m"}).kv_events
    assert found == KVEventsConfig(topic="kv@pod@m")
    with pytest.raises(ConfigError, match="which enable_prefix_caching turns off"):
        EngineConfig(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)


def test_each_engine_has_its_endpoints() -> None:
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of("inproc://x", 1) == "inproc://x_dp1"


# Over sockets.


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def context() -> Iterator[Any]:
    zmq = pytest.importorskip("zmq")
    found = zmq.Context()
    yield found
    found.destroy(linger=0)


def subscriber(context: Any, endpoint: str, topic: bytes = b"") -> Any:
    """One whose subscription arrives some time: see `published`."""
    import zmq

    found = context.socket(zmq.SUB)
    found.rcvtimeo = 60_000
    found.subscribe(topic)
    found.connect(endpoint)
    return found


def published(publisher: EventPublisher, listening: Any, message: Any) -> list[bytes]:
    """Publishes until it is heard: a subscription takes a while to arrive."""
    import zmq

    listening.rcvtimeo = 50
    for _ in range(1000):
        publisher.publish(message)
        try:
            frames: list[bytes] = listening.recv_multipart()
        except zmq.Again:
            continue
        listening.rcvtimeo = 60_000
        return frames
    raise AssertionError("nothing is heard")


def replayed(context: Any, endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """Numbers and payloads of the answer."""
    import zmq

    dealer = context.socket(zmq.DEALER)
    dealer.rcvtimeo = 60_000
    dealer.connect(endpoint)
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    found: list[tuple[int, bytes]] = []
    while not found or found[-1][0] != -1:
        empty, number, payload = dealer.recv_multipart()
        assert empty == b""
        found.append((int.from_bytes(number, "big", signed=True), payload))
    dealer.close()
    return found


def test_messages_arrive_in_order_and_again(context: Any, endpoints: tuple[str, str]) -> None:
    endpoint, replay = endpoints
    config = KVEventsConfig(endpoint=endpoint, replay_endpoint=replay, buffer_steps=5, topic="kv@pod@m")
    publisher = EventPublisher(config)
    listening = subscriber(context, endpoint, b"kv@")
    topic, number, payload = published(publisher, listening, "first")
    assert topic == b"kv@pod@m"
    assert msgspec.msgpack.decode(payload) == "first"
    last = int.from_bytes(number, "big")
    publisher.publish("begin")
    while msgspec.msgpack.decode(listening.recv_multipart()[2]) != "begin":
        last += 1  # one that was published while the subscription was on its way
    for message in range(20):
        publisher.publish(message)
    heard = [listening.recv_multipart() for _ in range(20)]
    numbers = [int.from_bytes(number, "big") for _, number, _ in heard]
    assert numbers == list(range(last + 2, last + 22))
    assert [msgspec.msgpack.decode(payload) for *_, payload in heard] == list(range(20))
    *again, end = replayed(context, replay, 0)
    assert end == (-1, b"")
    assert [(number, msgspec.msgpack.decode(payload)) for number, payload in again] == [
        (number, number - last - 2)
        for number in numbers[-5:]  # what is kept
    ]
    assert replayed(context, replay, numbers[-1] + 1) == [(-1, b"")]
    import zmq

    confused = context.socket(zmq.DEALER)
    confused.connect(replay)
    confused.send_multipart((b"", b"no number"))
    assert len(replayed(context, replay, numbers[-2])) == 3  # it has survived that
    publisher.close()
    publisher.close()


def test_what_is_published_last_leaves_before_the_end(context: Any, endpoints: tuple[str, str]) -> None:
    publisher = EventPublisher(KVEventsConfig(endpoint=endpoints[0]))
    listening = subscriber(context, endpoints[0])
    published(publisher, listening, "first")
    publisher.publish("last")
    publisher.close()
    heard = ""
    while heard != "last":
        heard = msgspec.msgpack.decode(listening.recv_multipart()[2])


def test_an_endpoint_in_use_is_named(context: Any, endpoints: tuple[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"kv_events_config: {endpoint}: Address already in use"):
            EventPublisher(KVEventsConfig(endpoint=endpoints[0], replay_endpoint=endpoint))


def test_an_engine_tells_of_its_pages(context: Any, endpoints: tuple[str, str], compile_cache_dir: str) -> None:
    endpoint, replay = endpoints
    options: dict[str, Any] = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    llm = LLM(
        str(LLAMA),
        skip_tokenizer_init=True,
        dtype="float32",
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        decode_steps=1,
        kv_cache_memory_bytes=2**19,
        kv_cache_dtype="int8",  # as in tests of offloading, whose programs these are
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
        kv_events_config=options,
    )
    listening = subscriber(context, endpoint)
    prompt = [1, 5, 9, 2, 7, 3, 8, 4, 6, 11]
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    tokens = [*prompt, *output.outputs[0].token_ids]
    llm.reset_prefix_cache()
    # All from the beginning, whenever the subscription has arrived.
    *messages, end = replayed(context, replay, 0)
    assert end == (-1, b"")
    assert [number for number, _ in messages] == list(range(len(messages)))
    batches = [msgspec.msgpack.decode(payload, type=EventBatch) for _, payload in messages]
    assert {batch.data_parallel_rank for batch in batches} == {0}
    events = [event for batch in batches for event in batch.events]
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids] == tokens[:16]
    hashes = [page for event in stored for page in event.block_hashes]
    assert len(set(hashes)) == 4
    parents = [event.parent_block_hash for event in stored]
    assert parents[0] is None
    assert parents[1:] == [event.block_hashes[-1] for event in stored[:-1]]
    assert events[-1] == AllBlocksCleared()
    listening.close()
    llm.close()
