"""The processes that run one model: how they find each other, what they refuse, and their messages."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmjax import host_memory
from llmjax.config import EngineConfig
from llmjax.engine.build import lead
from llmjax.engine.clients.wire import Channel, Failed, Failure, Leave
from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.commands import ProgramName, RunStep
from llmjax.engine.ranks import join, member
from llmjax.engine.ranks import leader as leading
from llmjax.engine.ranks.alone import Alone
from llmjax.engine.ranks.follower import Follower
from llmjax.engine.ranks.join import Gathering, free_port
from llmjax.engine.ranks.leader import Leader
from llmjax.engine.ranks.settings import shared_settings
from llmjax.engine.ranks.wire import Alive, Challenge, Compile, Compiled, Join, Welcome
from llmjax.errors import CompileError, ConfigError, EngineDead, LLMJaxError
from llmjax.kernels.choices import Choice, Choices
from llmjax.kernels.cpu import shared_sum
from tests.waiting import until

HOST = "127.0.0.1"
BUCKET = Bucket(tokens=4, rows=4, decode=True, steps=8)


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(
        model="somewhere",
        tensor_parallel_size=3,
        nnodes=3,
        master_port=free_port(HOST),
        master_secret="word",
        distributed_timeout_seconds=60,
    )


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not wait for ranks to end, because here they are objects of one process."""
    monkeypatch.setattr(leading, "LEAVE_SECONDS", 0)


def group_of(config: EngineConfig) -> Any:
    """A rank's side of its group."""
    return Follower(config) if config.node_rank else lead(config)


def joining(config: EngineConfig) -> Future[Any]:
    """A rank that is joining."""
    future: Future[Any] = Future()

    def join() -> None:
        try:
            future.set_result(group_of(config))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=join, daemon=True).start()
    return future


@contextmanager
def together(config: EngineConfig) -> Iterator[tuple[Leader, list[Follower]]]:
    ranks = [joining(config.replace(node_rank=rank)) for rank in (2, 0, 1)]
    second, leader, first = (rank.result(60) for rank in ranks)
    try:
        yield leader, [first, second]
    finally:
        leader.close()


def hang_up(follower: Follower) -> None:
    follower.channel._socket.shutdown(socket.SHUT_RDWR)


def test_one_process_needs_nobody() -> None:
    group = group_of(EngineConfig(model="somewhere"))
    assert type(group) is Alone and group.size == 1
    assert group.agree("model", [7]) == [7]
    assert group.everywhere(ProgramName.step(BUCKET), lambda: "program") == "program"


def test_ranks_agree_on_the_least_memory(config: EngineConfig) -> None:
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        pairs = zip(followers, ([5, 8], [9, 3]), strict=True)
        others = [threads.submit(follower.agree, "model", size) for follower, size in pairs]
        assert leader.agree("model", [7, 7]) == [5, 3]
        assert [other.result(60) for other in others] == [[5, 3], [5, 3]]


def test_rank_0_chooses_methods_for_all(config: EngineConfig) -> None:
    chosen = Choices((Choice("bfloat16", ((8, "C++"), (512, "XLA"))), Choice("float32", ((512, "XLA"),))))
    assert Alone().choose(lambda: chosen) == chosen
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        others = [threads.submit(follower.choose, lambda: pytest.fail("chosen twice")) for follower in followers]
        assert leader.choose(lambda: chosen) == chosen
        found = [other.result(60) for other in others]
    assert found == [chosen, chosen]
    assert len({hash(one) for one in [chosen, *found]}) == 1  # they are keys of JAX's caches


def test_ranks_of_one_machine_know_of_each_other(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with together(config) as (leader, followers):
        assert [rank.neighbors for rank in (leader, *followers)] == [3, 3, 3]
    names = iter(("one", "two"))  # of the two that join; then the leader looks
    monkeypatch.setattr(host_memory, "machine", lambda: next(names, "two"))
    with together(config.replace(master_port=free_port(HOST))) as (leader, followers):
        assert sorted(follower.neighbors for follower in followers) == [1, 2]
        assert leader.neighbors == 2


def test_ranks_share_memory_or_do_not(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        shared_sum.unnamed(shared_sum.make(3))
    except shared_sum.NotShared as why:
        pytest.skip(str(why))
    before = set(shared_sum.FOLDER.iterdir())
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        others = [threads.submit(follower.shares_memory, 3) for follower in followers]
        assert leader.shares_memory(3) and all(other.result(60) for other in others)
    attach, asked = shared_sum.attach, iter((False, True, False))

    def refuses_once(name: str, devices: int) -> None:
        if next(asked):
            raise shared_sum.NotShared("on another machine")
        attach(name, devices)

    monkeypatch.setattr(shared_sum, "attach", refuses_once)
    with together(config.replace(master_port=free_port(HOST))) as (leader, followers), ThreadPoolExecutor() as threads:
        others = [threads.submit(follower.shares_memory, 3) for follower in followers]
        assert not leader.shares_memory(3) and not any(other.result(60) for other in others)
    assert set(shared_sum.FOLDER.iterdir()) <= before


def test_other_models_are_refused_everywhere(config: EngineConfig) -> None:
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        others = [threads.submit(follower.agree, name, [1]) for follower, name in zip(followers, "ab", strict=True)]
        message = r"rank 2 \(127.0.0.1\) has loaded another model than rank 0"
        with pytest.raises(ConfigError, match=message):
            leader.agree("a", [1])
        for other in others:
            with pytest.raises(ConfigError, match=message):
                other.result(60)


def test_a_program_is_there_when_every_rank_has_it(config: EngineConfig) -> None:
    program = ProgramName.step(BUCKET)
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        made = threads.submit(leader.everywhere, ProgramName.step(BUCKET), lambda: "program")
        for follower in followers:
            assert next(follower.messages) == Compile(program)
        followers[0].channel.send(Compiled(program))
        assert not made.done()
        followers[1].channel.send(Compiled(program))
        assert made.result(60) == "program"


def test_a_program_that_one_rank_cannot_compile_is_nobodys(config: EngineConfig) -> None:
    program = ProgramName.masked(BUCKET)
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        made = threads.submit(leader.everywhere, ProgramName.masked(BUCKET), lambda: "program")
        assert next(followers[0].messages) == Compile(program)
        followers[0].channel.send(Compiled(program, Failure.of(CompileError("too large"))))
        followers[1].channel.send(Compiled(program))
        with pytest.raises(CompileError, match="too large"):
            made.result(60)


def test_what_is_told_comes_in_order_and_whole(config: EngineConfig) -> None:
    arrays = [np.arange(n, dtype=np.int32) for n in range(5)]
    with together(config) as (leader, followers):
        for values in arrays:
            leader.broadcast(RunStep(BUCKET, values))
        leader.close()
        for follower in followers:
            *steps, last = follower.messages
            assert isinstance(last, Leave)
            assert [step.bucket for step in steps] == [BUCKET] * len(arrays)
            for step, values in zip(steps, arrays, strict=True):
                np.testing.assert_array_equal(step.packed, values)


def test_a_rank_that_has_gone_ends_what_waits_for_it(config: EngineConfig) -> None:
    lost: Future[LLMJaxError] = Future()
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        leader.watch(lost.set_result)
        made = threads.submit(leader.everywhere, ProgramName.step(BUCKET), lambda: "program")
        assert isinstance(next(followers[0].messages), Compile)
        hang_up(followers[1])
        assert str(lost.result(60)) == "rank 2 (127.0.0.1) has gone"
        with pytest.raises(EngineDead, match="rank 2"):
            made.result(60)
        with pytest.raises(EngineDead, match="rank 2"):
            leader.broadcast(Compile(ProgramName.step(BUCKET)))
        assert str(leader.cause(ValueError("the exchange failed"))) == "rank 2 (127.0.0.1) has gone"
        late: list[LLMJaxError] = []
        leader.watch(late.append)
        assert late == [lost.result()]


def test_who_waits_for_the_others_is_woken_when_one_goes(config: EngineConfig) -> None:
    """JAX waits so on every rank while its processes connect."""
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        assert leader.unless_lost(lambda: "met") == "met"
        with pytest.raises(ZeroDivisionError):
            leader.unless_lost(lambda: 1 // 0)
        waiting = threads.submit(leader.unless_lost, threading.Event().wait)  # which nobody will set
        hang_up(followers[1])
        with pytest.raises(EngineDead, match=r"^rank 2 \(127.0.0.1\) has gone$"):
            waiting.result(60)
        with pytest.raises(EngineDead, match="rank 2"):
            leader.unless_lost(threading.Event().wait)  # later calls raise it too


def test_a_leader_that_has_gone_is_known_to_ranks_that_do_something_else(config: EngineConfig) -> None:
    lost: Future[LLMJaxError] = Future()
    with together(config) as (leader, followers):
        followers[0].watch(lost.set_result)
        leader._peers[0].channel._socket.shutdown(socket.SHUT_RDWR)
        assert str(lost.result(60)) == "rank 0 has gone"  # and nobody has asked for messages
        assert str(followers[0].cause(ValueError("the exchange failed"))) == "rank 0 has gone"
        assert list(followers[0].messages) == []


def test_all_ranks_hear_which_one_has_gone(config: EngineConfig) -> None:
    losses: list[Future[LLMJaxError]] = [Future(), Future()]
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        others = [threads.submit(follower.agree, "model", [5]) for follower in followers]
        leader.agree("model", [5])
        for other, follower, lost in zip(others, followers, losses, strict=True):
            other.result(60)
            follower.watch(lost.set_result)
        hang_up(followers[1])
        assert str(losses[0].result(60)) == "rank 2 (127.0.0.1) has gone"


def test_a_rank_that_is_stopped_is_named(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank stays connected; here no rank sends signs of life."""
    monkeypatch.setattr(member, "SILENT_SECONDS", 1)
    lost: Future[LLMJaxError] = Future()
    with together(config) as (leader, _):
        leader.watch(lost.set_result)
        assert re.fullmatch(r"rank [12] \(127.0.0.1\) has given no sign of life for 1 s", str(lost.result(60)))
        with pytest.raises(EngineDead, match="no sign of life"):
            leader.broadcast(Compile(ProgramName.step(BUCKET)))


def test_signs_of_life_are_nobody_elses_affair(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "PULSE_SECONDS", 0.001)
    pulses, send = threading.Semaphore(0), Channel.send

    def counted(channel: Channel, message: Any) -> None:
        send(channel, message)
        if isinstance(message, Alive):
            pulses.release()

    monkeypatch.setattr(Channel, "send", counted)
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        for _ in range(50):  # of all ranks
            pulses.acquire()
        others = [threads.submit(follower.agree, "model", [5]) for follower in followers]
        assert leader.agree("model", [7]) == [5]
        assert [other.result(60) for other in others] == [[5], [5]]


def test_a_group_that_ends_is_no_loss(config: EngineConfig) -> None:
    lost: list[LLMJaxError] = []
    with together(config) as (leader, followers):
        for rank in (leader, *followers):
            rank.watch(lost.append)
        leader.close()
        for follower in followers:
            assert [type(message) for message in follower.messages] == [Leave]
    assert not lost


def test_rank_0_ends_after_the_others(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "LEAVE_SECONDS", 60)
    with together(config) as (leader, followers), ThreadPoolExecutor() as threads:
        closing = threads.submit(leader.close)
        for follower in followers:
            assert next(follower.messages) == Leave() and not closing.done()
            hang_up(follower)
        closing.result(60)


def test_a_rank_says_why_it_goes(config: EngineConfig) -> None:
    lost: Future[LLMJaxError] = Future()
    with together(config) as (leader, followers):
        leader.watch(lost.set_result)
        followers[0].channel.send(Failed(Failure.of(ConfigError("no such device"))))
        hang_up(followers[0])
        assert str(lost.result(60)) == "rank 1 (127.0.0.1): no such device"


def one_second_until(monkeypatch: pytest.MonkeyPatch, over: Callable[[Gathering], object]) -> None:
    """A second passes for those who gather as soon as this holds of one of them, however busy the machine is."""
    gatherings, peers = list[Gathering](), Gathering.peers

    def noted(gathering: Gathering, listener: socket.socket) -> Any:
        gatherings.append(gathering)
        return peers(gathering, listener)

    def clock() -> float:
        return 1.0 if any(map(over, gatherings)) else 0.0

    monkeypatch.setattr(Gathering, "peers", noted)
    monkeypatch.setattr(join, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))


def test_a_rank_that_does_not_come_is_named(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    one_second_until(monkeypatch, lambda gathering: gathering._came)
    first = joining(config.replace(node_rank=1))
    with pytest.raises(ConfigError, match=r"^rank 2 did not come within 1 s$") as caught:
        group_of(config.replace(distributed_timeout_seconds=1.0))
    with pytest.raises(ConfigError) as told:
        first.result(60)
    assert str(told.value) == str(caught.value)


def test_a_leader_that_does_not_come_is_named(config: EngineConfig) -> None:
    where = f"rank 0 at 127.0.0.1:{config.master_port}"
    with pytest.raises(ConfigError, match=rf"rank 1 does not reach {where}: .*refused"):
        group_of(config.replace(node_rank=1, distributed_timeout_seconds=0.1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 3}, "rank 1 (127.0.0.1) has max_num_seqs 3, and rank 0 has 0: start all ranks alike"),
        ({"dtype": "float32"}, "rank 1 (127.0.0.1) has dtype 'float32', and rank 0 has 'auto': start all ranks alike"),
    ],
)
def test_other_settings_end_all_ranks(config: EngineConfig, change: dict[str, Any], message: str) -> None:
    other = joining(config.replace(node_rank=1, **change))
    with pytest.raises(ConfigError) as caught:
        group_of(config)
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as told:
        other.result(60)
    assert str(told.value) == message


def test_other_versions_end_all_ranks(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = joining(config)
    until_listening(config)
    # In the other rank alone: the leader may listen before it has read its own version.
    other = {**shared_settings(config), "llmjax": "9.9"}
    monkeypatch.setattr("llmjax.engine.ranks.follower.shared_settings", lambda _: other)
    with pytest.raises(ConfigError, match=r"has llmjax 9\.9, and rank 0 has"):
        group_of(config.replace(node_rank=2))
    with pytest.raises(ConfigError, match=r"has llmjax 9\.9, and rank 0 has"):
        leader.result(60)


def test_settings_of_one_machine_may_differ(config: EngineConfig) -> None:
    ranks = [
        joining(config.replace(node_rank=rank, threads=rank, model=f"/disk{rank}", device_ids=str(rank)))
        for rank in range(3)
    ]
    ranks[0].result(60).close()


def test_a_wrong_secret_is_refused_and_the_right_ones_are_waited_for(config: EngineConfig) -> None:
    leader = joining(config)
    with pytest.raises(ConfigError, match=r"^the master_secret of this rank is not that of rank 0$"):
        group_of(config.replace(node_rank=1, master_secret="another"))
    with pytest.raises(ConfigError, match="master_secret"):
        group_of(config.replace(node_rank=1, master_secret=None))
    others = [joining(config.replace(node_rank=rank)) for rank in (1, 2)]
    leader.result(60).close()
    assert all(other.result(60) for other in others)


def test_who_waits_hears_of_the_refused(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    one_second_until(monkeypatch, lambda gathering: gathering._refusals)
    leader = joining(config.replace(distributed_timeout_seconds=1))
    with pytest.raises(ConfigError):
        group_of(config.replace(node_rank=1, master_secret="another"))
    with pytest.raises(ConfigError, match=r"rank 1, 2 did not come within 1 s; refused: a process at 127.0.0.1: it "):
        leader.result(60)


def test_a_leader_that_does_not_know_the_secret_is_refused(config: EngineConfig) -> None:
    """The false leader asks for a proof, and welcomes any process that sends one."""
    with socket.create_server((HOST, config.master_port)) as server:

        def welcome() -> None:
            connection, _ = server.accept()
            with connection:
                channel = Channel(connection, Join)
                channel.send(Challenge(b"x" * 32))
                assert next(channel.receive()).rank == 1
                channel.send(Welcome(b"y" * 32, 1, 1))

        thread = threading.Thread(target=welcome)
        thread.start()
        with pytest.raises(ConfigError, match=r"does not know the master_secret of this rank$"):
            group_of(config.replace(node_rank=1))
        thread.join(60)


def test_the_same_rank_twice(config: EngineConfig) -> None:
    leader = joining(config)
    first = joining(config.replace(node_rank=1))
    twice = joining(config.replace(node_rank=1))
    wait([first, twice], timeout=60, return_when=FIRST_COMPLETED)  # before all are there
    joining(config.replace(node_rank=2))
    leader.result(60).close()
    errors = [error for rank in (first, twice) if (error := rank.exception(60)) is not None]
    assert [str(error) for error in errors] == ["there is already a rank 1, at 127.0.0.1"]


def test_a_rank_that_there_is_not(config: EngineConfig) -> None:
    leader = joining(config)
    message = r"^rank 3 \(127.0.0.1\) is not one of the 3 ranks \(nnodes\)$"
    with pytest.raises(ConfigError, match=message):
        group_of(config.replace(node_rank=3, nnodes=4, tensor_parallel_size=4))
    with pytest.raises(ConfigError, match=message):
        leader.result(60)


GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a long message": struct.pack("<I", 2**31) + b"x" * 1000,
    "no MessagePack": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_strangers_are_not_believed(config: EngineConfig, name: str) -> None:
    leader = joining(config)
    until_listening(config)
    with socket.create_connection((HOST, config.master_port), timeout=60) as stranger:
        stranger.sendall(GARBAGE[name])
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(2**16):  # until it hangs up
            pass
    others = [joining(config.replace(node_rank=rank)) for rank in (1, 2)]
    leader.result(60).close()
    assert all(other.result(60) for other in others)


def test_strangers_who_say_nothing_keep_no_rank_out(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "MOST_STRANGERS", 4)
    monkeypatch.setattr(join, "FIRST_SECONDS", 600.0)
    leader = joining(config)
    until_listening(config)
    strangers = [socket.create_connection((HOST, config.master_port), timeout=60) for _ in range(9)]
    for stranger in strangers[:5]:  # the oldest had to go
        with suppress(ConnectionResetError):
            while stranger.recv(2**16):
                pass
    others = [joining(config.replace(node_rank=rank)) for rank in (1, 2)]
    leader.result(60).close()
    assert all(other.result(60) for other in others)
    for stranger in strangers:
        stranger.close()


def test_who_is_no_leader(config: EngineConfig) -> None:
    with socket.create_server((HOST, config.master_port)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match=rf"rank 0 at 127.0.0.1:{config.master_port} .*"):
            group_of(config.replace(node_rank=1))
        thread.join(60)


def test_a_port_in_use(config: EngineConfig) -> None:
    with (
        socket.create_server((HOST, config.master_port)),
        pytest.raises(ConfigError, match=f"master_port {config.master_port}: rank 0 cannot listen there .*in use"),
    ):
        group_of(config)


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: Exception | str) -> list[str]:
    """Has names lead to one address after another, the last one for ever; what has been asked for."""
    real, asked, left = socket.getaddrinfo, list[str](), list(answers)

    def resolve(host: str, *args: Any, **more: Any) -> Any:
        asked.append(host)
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return real(answer, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(join, "RETRY_SECONDS", 0)
    return asked


UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_rank_0_waits_for_its_own_name(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = resolving(monkeypatch, UNKNOWN, UNKNOWN, "192.0.2.1", HOST)  # the third: of the machine before
    with join.listen(config.replace(master_addr="rank-0.example")) as listener:
        assert listener.getsockname() == (HOST, config.master_port)
    assert asked == ["rank-0.example"] * 4
    (record,) = caplog.records
    assert "Name or service not known; trying for 60 s" in record.getMessage()


def test_a_name_that_never_comes_is_named(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, UNKNOWN)
    with pytest.raises(ConfigError, match=r"master_addr rank-0\.example, .*\(Name or service not known\)"):
        join.listen(config.replace(master_addr="rank-0.example", distributed_timeout_seconds=1e-9))


def test_an_address_of_another_machine(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match=r"master_addr 192.0.2.1, .*an address of its machine"):
        group_of(config.replace(master_addr="192.0.2.1"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nnodes": 2}, "nnodes 2 must divide tensor_parallel_size, which is not given"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "nnodes 2 must divide tensor_parallel_size, which is 3"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank is 2, and nnodes 2 has ranks below 2"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size 2: such engines are"),
        (
            {"nnodes": 2, "tensor_parallel_size": 4, "device_ids": "0,1,2"},
            "tensor_parallel_size 4 over 2 processes (nnodes) is not 3 devices in each",
        ),
        ({"multi_process": True, "nnodes": 2, "tensor_parallel_size": 2}, "multi_process starts its processes itself"),
        ({"master_port": 70000}, "master_port must be from 1 to 65535, not 70000"),
        ({"distributed_timeout_seconds": 0}, "distributed_timeout_seconds must be above 0, not 0"),
    ],
)
def test_groups_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="somewhere", **settings)
    assert str(caught.value).startswith(message)


def test_devices_are_those_of_one_process() -> None:
    assert EngineConfig(model="somewhere", nnodes=2, tensor_parallel_size=4).device_numbers == (0, 1)
    config = EngineConfig(model="somewhere", nnodes=2, tensor_parallel_size=4, device_ids="2,3")
    assert config.device_numbers == (2, 3)


def until_listening(config: EngineConfig) -> None:
    """Returns when there is a leader."""

    def listens() -> bool:
        with socket.socket() as connection:
            return connection.connect_ex((HOST, config.master_port)) == 0

    until(listens)
