"""One engine computes prompts, another goes on: over a simulated device that knows what pages hold, and whole."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.build import build_engine
from llmjax.engine.tiers import transfer as page_transfer
from llmjax.engine.tiers.host import PageFormat
from llmjax.engine.tiers.offload import PagesLost
from llmjax.engine.tiers.setup import secret_of
from llmjax.engine.tiers.transfer import PageGiver, PageTaker, bind
from llmjax.errors import ConfigError, InvalidRequest
from llmjax.kv_transfer import KVTransfer, KVTransferConfig
from llmjax.models.layers.state import AllTokens, LastState, LastTokens, Span
from tests.checkpoints import GOLDEN
from tests.engine.core.test_scheduler import Arrival, Shape, SimulatedEngine, alone, prompt_of, request, run

pytestmark = pytest.mark.usefixtures("patience")

ALL, STATE = AllTokens(), LastState()
SHAPE = Shape(
    page_size=4,
    spans=(ALL,),
    num_pages=(20,),
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=64,
    host_pages=100,
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def formats_of(shape: Shape) -> list[PageFormat]:
    content = (
        jax.ShapeDtypeStruct((shape.page_size,), np.int64),
        jax.ShapeDtypeStruct((shape.page_size,), np.bool_),
    )
    return [PageFormat(shape.page_size, content)] * len(shape.spans)


def giver_of(
    shape: Shape, *, secret: str = "word", identity: str = "same", seconds: float = 3600.0, **options: Any
) -> PageGiver:
    config = KVTransferConfig(kv_connector="TCPConnector", kv_role="kv_producer", kv_port=free_port(), **options)
    giver = PageGiver(
        config, bind(config), identity=identity, secret=secret, formats=formats_of(shape), seconds=seconds
    )
    giver.port = config.kv_port  # type: ignore[attr-defined]
    return giver


def at(port: int) -> str:
    """A server of this machine."""
    return f"127.0.0.1:{port}"


def taking(shape: Shape, port: int, *, secret: str = "word", identity: str = "same") -> SimulatedEngine:
    """An engine that takes pages from a port of this machine."""
    taker = PageTaker([at(port)], identity=identity, secret=secret, formats=formats_of(shape))
    return SimulatedEngine(shape, taker=taker)


def giving(shape: Shape, giver: PageGiver, prompt: list[int], name: str = "pages") -> SimulatedEngine:
    """An engine that has computed a prompt, whose pages it gives."""
    engine = SimulatedEngine(shape, giver=giver)
    asked = request("first", prompt, max_tokens=1, kv_transfer=KVTransfer(give=name))
    run(engine, [Arrival(asked, 0)], max_steps=50)
    return engine


def taken(engine: SimulatedEngine, prompt: list[int], port: int, *, name: str = "pages", id: str = "second") -> int:
    """Continues the prompt; tokens of it that were found."""
    before = engine.totals.prefix_cache_hits
    transfer = KVTransfer(take=name, peer=at(port))
    asked = request(id, prompt, max_tokens=4, kv_transfer=transfer)
    found = run(engine, [Arrival(asked, 0)], max_steps=20_000)[id, 0]
    assert found.tokens == alone(prompt, 3, 4, frozenset())
    return engine.totals.prefix_cache_hits - before


@pytest.mark.parametrize("spans", [(ALL,), (ALL, LastTokens(6)), (LastTokens(6),), (ALL, STATE), (STATE,)], ids=str)
def test_a_prompt_is_continued_where_it_was_not_computed(spans: tuple[Span, ...]) -> None:
    shape = replace(SHAPE, spans=spans, num_pages=(20,) * len(spans))
    giver, prompt = giver_of(shape), prompt_of(42)
    giving(shape, giver, prompt)
    assert giver.waiting == 1
    engine = taking(shape, giver.port)  # type: ignore[attr-defined]
    assert taken(engine, prompt, giver.port) == 40  # type: ignore[attr-defined]
    assert engine.totals.offload.remote_hits == 40
    assert engine.totals.offload.remote_read_bytes > 0
    assert giver.waiting == 0
    # What has been taken is known; what is not there any more is computed, if the device has lost it.
    assert taken(engine, prompt, giver.port, id="third") == 40  # type: ignore[attr-defined]
    assert taken(taking(shape, giver.port), prompt, giver.port, id="fourth") == 0  # type: ignore[attr-defined]
    giver.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"secret": "other"}, "it has another master_secret"),
        ({"secret": ""}, "it has another master_secret"),
        ({"identity": "other"}, "it has another model, other types or another page size"),
    ],
)
def test_who_does_not_fit_gets_nothing(wrong: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    giver, prompt = giver_of(SHAPE), prompt_of(42)
    giving(SHAPE, giver, prompt)
    assert taken(taking(SHAPE, giver.port, **wrong), prompt, giver.port) == 0  # type: ignore[attr-defined]
    assert why in caplog.text
    assert giver.waiting == 1
    assert taken(taking(SHAPE, giver.port), prompt, giver.port) == 40  # type: ignore[attr-defined]
    giver.close()


def test_nobody_there_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    assert taken(taking(SHAPE, port), prompt_of(42), port) == 0
    assert "pages of another server are computed here" in caplog.text


class Relay:
    """Passes on the first ``count`` bytes that a server sends."""

    def __init__(self, port: int, count: int, *, at: int = 0) -> None:
        self._target, self._count = port, count
        self._server = socket.create_server(("127.0.0.1", at))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._server.accept()
        with client, socket.create_connection(("127.0.0.1", self._target)) as upstream:
            threading.Thread(target=self._pass, args=(client, upstream, 10**9), daemon=True).start()
            self._pass(upstream, client, self._count)
            client.shutdown(socket.SHUT_RDWR)
        self._server.close()

    @staticmethod
    def _pass(source: socket.socket, to: socket.socket, left: int) -> None:
        try:
            while left and (data := source.recv(min(left, 4096))):
                to.sendall(data)
                left -= len(data)
        except OSError:
            return


@pytest.mark.parametrize("count", [0, 10, 60, 200, 400])
def test_a_connection_that_is_cut_costs_only_what_has_not_come(count: int) -> None:
    giver, prompt = giver_of(SHAPE), prompt_of(42)
    giving(SHAPE, giver, prompt)
    relay = Relay(giver.port, count)  # type: ignore[attr-defined]
    found = taken(taking(SHAPE, relay.port), prompt, relay.port)
    assert found % 4 == 0 and found < 40
    assert (found > 0) == (count >= 200)
    giver.close()


def test_strange_servers_are_not_believed() -> None:
    """Bytes that no message has, too long ones, and ends at any place."""
    formats = formats_of(SHAPE)
    strange = [
        b"",
        b"x",
        struct.pack("<I", 2**31),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + b"\x90",
    ]
    for said in strange:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer(server: socket.socket = server, said: bytes = said) -> None:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(said)

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            peer = at(server.getsockname()[1])
            taker = PageTaker([peer], identity="same", secret="word", formats=formats)
            with pytest.raises(PagesLost):
                list(taker.take("pages", peer=peer))
            thread.join()


def test_strange_takers_harm_nobody() -> None:
    giver, prompt = giver_of(SHAPE), prompt_of(42)
    giving(SHAPE, giver, prompt)
    for said in (b"", b"x" * 5000, struct.pack("<I", 2**31), struct.pack("<I", 1) + b"\xc1"):
        with socket.create_connection(("127.0.0.1", giver.port)) as connection:  # type: ignore[attr-defined]
            connection.sendall(said)
    assert taken(taking(SHAPE, giver.port), prompt, giver.port) == 40  # type: ignore[attr-defined]
    giver.close()
    giver.close()


def test_the_oldest_pages_make_room() -> None:
    each = sum(form.num_bytes for form in formats_of(SHAPE))
    giver = giver_of(SHAPE, kv_buffer_size=25 * each)
    for number in range(4):  # ten pages each
        giving(SHAPE, giver, prompt_of(42, number), name=str(number))
    assert list(giver._gifts) == ["2", "3"]
    giver.close()
    assert giver.waiting == 0


def test_pages_that_nobody_takes_are_given_up_although_no_others_come() -> None:
    giver = giver_of(SHAPE, seconds=1e-9)
    giving(SHAPE, giver, prompt_of(42))
    with giver._changed:
        assert giver._changed.wait_for(lambda: not giver.waiting, 60)
    giver.close()


def silent(port: int, count: int) -> list[socket.socket]:
    """Connections of those who say nothing, or not all of it."""
    connections = []
    for number in range(count):
        connections.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        assert connections[-1].recv(1)  # it has been let in
        if number % 2:
            connections[-1].sendall(b"x")
    return connections


def test_who_says_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfer, "MOST_TAKERS", 2)
    monkeypatch.setattr(page_transfer, "MOST_STRANGERS", 4)
    monkeypatch.setattr(page_transfer, "CONNECT_SECONDS", 600.0)
    giver, prompt = giver_of(SHAPE), prompt_of(42)
    giving(SHAPE, giver, prompt)
    connections = silent(giver.port, 12)  # type: ignore[attr-defined]
    assert taken(taking(SHAPE, giver.port), prompt, giver.port) == 40  # type: ignore[attr-defined]
    for connection in connections[:8]:  # the oldest had to go, and are closed to the end
        with suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    for connection in connections:
        connection.close()
    giver.close()


def test_takers_that_there_is_no_place_for_hear_it(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(page_transfer, "MOST_TAKERS", 0)
    giver, prompt = giver_of(SHAPE), prompt_of(42)
    giving(SHAPE, giver, prompt)
    assert taken(taking(SHAPE, giver.port), prompt, giver.port) == 0  # type: ignore[attr-defined]
    assert "it gives pages to too many others" in caplog.text
    giver.close()


def test_an_address_in_use_is_known_before_anything_is_loaded() -> None:
    giver = giver_of(SHAPE)
    transfer = BOTH | {"kv_port": giver.port}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^kv_transfer_config: 127\.0\.0\.1:\d+: Address already in use"):
        build_engine(EngineConfig(model="/there/is/nothing", kv_transfer_config=transfer))
    giver.close()


def test_an_address_in_use_is_named() -> None:
    giver = giver_of(SHAPE)
    config = KVTransferConfig(kv_connector="TCPConnector", kv_role="kv_producer", kv_port=giver.port)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"kv_transfer_config: 127.0.0.1:{config.kv_port}: Address already in use"):
        bind(config)
    giver.close()


# What settings and requests say.

BOTH = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_peers": ["10.0.0.1:7", "[FD00::1]:7", "Pod-0.svc:8"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "kv_connector must be one of NixlConnector, TCPConnector, not None"),
        (BOTH | {"kv_role": "both"}, "kv_role must be one of kv_both, kv_producer, kv_consumer, not 'both'"),
        (BOTH | {"kv_ports": 1}, "unknown key 'kv_ports'; did you mean kv_port?"),
        (BOTH | {"kv_port": 0}, "kv_port must be a port, not 0"),
        (BOTH | {"kv_buffer_size": "many"}, "kv_buffer_size must be a number of bytes, not 'many'"),
        (BOTH | {"kv_ip": 5}, "kv_ip must be a string, not 5"),
        (BOTH | {"kv_peers": []}, "kv_role kv_both takes pages from other servers: name them"),
        (BOTH | {"kv_peers": None, "kv_role": "kv_consumer"}, "kv_role kv_consumer takes pages from other servers"),
        (BOTH | {"kv_peers": "10.0.0.1:7"}, "kv_peers must be a list of servers"),
        *(
            (BOTH | {"kv_peers": [peer]}, f"kv_peers must hold host:port, not {peer!r}")
            for peer in ("10.0.0.1", "10.0.0.1:", ":7", "h:0", "h:70000", "h:x", "u@h:7", "h:7/x", "http://h:7", "", 7)
        ),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(kv_transfer_config=values)
    assert message in str(caught.value)


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="servers of one engine: leave out data_parallel_size"):
        EngineConfig(kv_transfer_config=BOTH, data_parallel_size=2)
    with pytest.raises(ConfigError, match="which enable_prefix_caching turns off"):
        EngineConfig(kv_transfer_config=BOTH, enable_prefix_caching=False)


def test_answers_are_the_next_servers_requests() -> None:
    config = KVTransferConfig(**BOTH, kv_ip="10.0.0.1", kv_port=7)  # type: ignore[arg-type]
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    first = KVTransfer.of(asked, config, name="n")
    assert first == KVTransfer(give="n")
    answer = config.answer(name="n", num_pages=2)
    assert answer["remote_block_ids"] == [0, 1]
    assert answer["remote_engine_id"] == "10.0.0.1:7"
    assert KVTransfer.of(answer, config, name="other") == KVTransfer(take="n", peer="10.0.0.1:7")
    assert KVTransfer.of(None, None, name="") is None
    assert KVTransfer.of({}, None, name="") is None


@pytest.mark.parametrize(
    ("values", "role", "message"),
    [
        ([], "kv_both", "must be an object"),
        (
            {"prefill_addr": "a", "room": 5},
            "kv_both",
            "has prefill_addr, room, a form that is not known: .* NixlConnector",
        ),
        ({"do_remote_decode": True, "transfer_id": "x"}, "kv_both", "transfer_id is of the form of MooncakeConnector"),
        ({"do_remote_prefill": True, "remote_bootstrap_addr": "x"}, "", "is of the form of MooncakeConnector"),
        ({"do_remote_decode": 1}, "kv_both", "one may be true"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "kv_both", "one may be true"),
        ({"do_remote_decode": True}, "kv_consumer", "its kv_role kv_producer or kv_both"),
        ({"do_remote_prefill": True}, "kv_producer", "its kv_role kv_consumer or kv_both"),
        ({"do_remote_prefill": True}, "", "a server started with --kv-transfer-config"),
        ({"do_remote_prefill": True, "remote_port": 5, "remote_request_id": "x"}, "kv_both", "remote_host"),
        ({"do_remote_prefill": True, "remote_host": "h", "remote_request_id": "x"}, "kv_both", "remote_port"),
        ({"do_remote_prefill": True, "remote_host": "h", "remote_port": 5}, "kv_both", "remote_request_id"),
        *(
            (
                {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "remote_request_id": "x"},
                "kv_both",
                f"{host}:{port} is not one of the servers that this one takes pages from; .* kv_peers",
            )
            for host, port in (
                ("10.0.0.1", 8),
                ("10.0.0.2", 7),
                ("127.0.0.1", 14579),
                ("10.0.0.1:7", 7),
                ("fd00::2", 7),
            )
        ),
    ],
)
def test_wrong_requests_are_refused(values: Any, role: str, message: str) -> None:
    config = KVTransferConfig(**(BOTH | {"kv_role": role})) if role else None  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=message) as caught:
        KVTransfer.of(values, config, name="n")
    assert caught.value.field == "kv_transfer_params"


@pytest.mark.parametrize(
    ("host", "port", "peer"),
    [("10.0.0.1", 7, "10.0.0.1:7"), ("fd00::1", 7, "[FD00::1]:7"), ("pod-0.SVC", 8, "Pod-0.svc:8")],
)
def test_requests_name_servers_of_the_operators_list(host: str, port: int, peer: str) -> None:
    values = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "remote_request_id": "x"}
    config = KVTransferConfig(**BOTH)  # type: ignore[arg-type]
    assert KVTransfer.of(values, config, name="n") == KVTransfer(take="x", peer=peer)


def test_nothing_connects_to_a_server_that_is_not_listed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        peer = at(elsewhere.getsockname()[1])
        taker = PageTaker([at(free_port())], identity="same", secret="word", formats=formats_of(SHAPE))
        with pytest.raises(PagesLost, match=f"{peer} is not one of kv_peers"):
            list(taker.take("pages", peer=peer))
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_a_secret_is_made_and_said_where_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(kv_transfer_config=BOTH)
    made = [secret_of(config) for _ in range(2)]
    assert made[0] != made[1] and all(len(secret) == 32 for secret in made)
    assert [
        record.getMessage().endswith(f"--master-secret {secret}")
        for record, secret in zip(caplog.records, made, strict=True)
    ] == [True] * 2
    assert secret_of(config.replace(master_secret="word")) == "word"
    assert len(caplog.records) == 2


# Whole engines.


@pytest.fixture
def engines(compile_cache_dir: str) -> Iterator[list[LLM]]:
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "page_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "decode_steps": 1,
        "kv_cache_memory_bytes": 2**19,
        "compilation_cache_dir": compile_cache_dir,
        "compile_threads": 1,
        "kv_cache_dtype": "int8",
        "master_secret": "word",
    }
    make = partial(LLM, str(GOLDEN / "llama"), **settings)
    roles, ports = ("kv_producer", "kv_consumer"), [free_port(), free_port()]
    both = BOTH | {"kv_buffer_size": 2**20, "kv_peers": [at(ports[0])]}
    transfers = [both | {"kv_role": role, "kv_port": port} for role, port in zip(roles, ports, strict=True)]
    llms = [make(kv_transfer_config=transfer) for transfer in transfers] + [make()]
    yield llms
    for llm in llms:
        llm.close()


def test_tokens_are_those_of_one_engine(engines: list[LLM]) -> None:
    first, second, alone_ = engines
    prompt = np.random.default_rng(0).integers(0, 96, 30).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (expected,) = alone_.generate([prompt], greedy, use_tqdm=False)
    first.generate([prompt], greedy.clone(max_tokens=1, kv_transfer=KVTransfer(give="p")), use_tqdm=False)
    config = first.config.kv_transfer
    assert config is not None
    transfer = KVTransfer(take="p", peer=f"{config.kv_ip}:{config.kv_port}")
    (output,) = second.generate([prompt], greedy.clone(kv_transfer=transfer), use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.num_cached_tokens == 28
    assert second.stats.offload.remote_hits == 28
