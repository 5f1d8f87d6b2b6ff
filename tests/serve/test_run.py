"""A real process: the ready lines, SIGTERM that lets streams finish, ports that are taken."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.engine.ranks.join import free_port
from llmjax.errors import ConfigError
from llmjax.serve.listen import bind, check_tls
from llmjax.serve.run import _end_with_rank_0
from tests.serve.conftest import children
from tests.waiting import until, until_ended


def serve_command(config: EngineConfig, *flags: str, program: Sequence[str] = ("-m", "serve")) -> list[str]:
    """``python -m serve`` with the settings that are not defaults."""
    command = [sys.executable, *program, "--port", "0", *flags]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default and field.default is not dataclasses.MISSING:
            command += [f"--{field.name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return command


@contextmanager
def process(
    config: EngineConfig, *flags: str, program: Sequence[str] = ("-m", "serve")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its URL."""
    command = serve_command(config, *flags, program=program)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    seen: list[str] = []
    try:
        for line in server.stdout:
            seen.append(line)
            found = re.search(r"is served at (http://127\.0\.0\.1:\d+)/v1", line)
            if found:
                shown = "".join(seen)  # what a start shows while nobody is answered yet
                # Other processes may say something in between.
                assert re.search(r"(?s)llmjax [\d.]+ starts with .* loading .* the weights are there after ", shown), (
                    shown
                )
                assert server.stdout.readline().startswith("try: curl http://127.0.0.1:")
                yield server, found[1]
                return
        pytest.fail("the server did not start:\n" + "".join(seen))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def stream(url: str, lines: list[str], **fields: Any) -> threading.Thread:
    """Starts to read a stream into ``lines``."""
    body = {"prompt": [40, 41], "stream": True, "ignore_eos": True, **fields}

    def read() -> None:
        with (
            suppress(httpx.TransportError),  # a server that ends at once says nothing any more
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as response,
        ):
            lines.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def wait_closed(url: str) -> None:
    """Until the server takes no requests any more."""
    until(lambda: httpx.get(f"{url}/health", timeout=None).status_code == 503)


ENDLESS: dict[str, Any] = {"max_tokens": 500, "n": 128}  # for as long as a test takes


def stalled(url: str) -> socket.socket:
    """A request whose body does not come to its end."""
    client = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt": '.encode())
    return client


def test_sigterm_lets_streams_finish_and_answers_whatever_else_there_is(engine_config: EngineConfig) -> None:
    flags = ("--shutdown-timeout", "600", "--read-timeout", "3600")
    with process(engine_config, *flags) as (server, url), stalled(url) as client:
        short: list[str] = []
        reader = stream(url, short, max_tokens=200)
        until(lambda: bool(short))
        body = {"prompt": [40, 41], "stream": True, "ignore_eos": True, **ENDLESS}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as endless:
            lines = endless.iter_lines()  # dropping it would close the connection
            next(lines)
            server.send_signal(signal.SIGTERM)
            wait_closed(url)
            response = httpx.post(f"{url}/v1/completions", json={"prompt": [40]}, timeout=None)
            reader.join()
        answer = b""
        while part := client.recv(65536):
            answer += part
        assert server.wait() == 0  # as soon as the endless stream has nobody who reads it
        assert server.stdout is not None
        entries = [json.loads(line) for line in server.stdout.read().splitlines() if line.startswith("{")]
    assert response.status_code == 503 and response.headers["retry-after"] == "600"
    assert response.json()["error"]["code"] == "shutting_down"
    assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in answer
    assert short[-1] == "data: [DONE]"
    assert json.loads(short[-2][6:])["choices"][0]["finish_reason"] == "length"
    (done,) = (entry for entry in entries if entry["status"] == 200 and "error" not in entry)
    assert (done["prompt_tokens"], done["completion_tokens"]) == (2, 200)


def test_streams_that_take_too_long_are_cut(
    engine_config: EngineConfig,
    start_server: Callable[[EngineConfig, ServerConfig], tuple[Any, Callable[[], None]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    running, stop = start_server(engine_config, ServerConfig(port=0, shutdown_timeout=30))
    running.server._last_words = 30.0  # all of it: no time to finish
    with caplog.at_level(logging.INFO, logger="llmjax.serve.access"):
        try:
            lines: list[str] = []
            reader = stream(running.url, lines, **ENDLESS)
            until(lambda: bool(lines))
            running.loop.call_soon_threadsafe(running.server._start_drain, "a test")
            reader.join()
        finally:
            stop()
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["error"]["code"] == "aborted"
    (record,) = (record for record in caplog.records if record.name == "llmjax.serve.access")
    assert json.loads(record.getMessage())["error"] == "the request was aborted"


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(engine_config: EngineConfig) -> None:
    with process(engine_config, "--shutdown-timeout", "600") as (server, url):
        lines: list[str] = []
        reader = stream(url, lines, **ENDLESS)
        until(lambda: bool(lines))
        server.send_signal(signal.SIGTERM)
        wait_closed(url)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM
        reader.join()


def test_a_killed_engine_process_ends_streams_with_an_error_and_the_server_with_its_status(
    engine_config: EngineConfig,
) -> None:
    with process(engine_config) as (server, url):
        lines: list[str] = []
        reader = stream(url, lines, **ENDLESS)
        until(lambda: bool(lines))
        assert httpx.get(f"{url}/health", timeout=None).status_code == 200
        (engine,) = children(server.pid)
        os.kill(engine, signal.SIGKILL)
        reader.join()
        answer = httpx.get(f"{url}/health", timeout=None)
        late = httpx.post(f"{url}/v1/completions", json={"prompt": [40]}, timeout=None)
        assert server.stdout is not None
        log = ""
        while not all(said in log for said in ("with status 137", "SIGKILL")):  # by two threads, each in its time
            line = server.stdout.readline()
            assert line, log
            log += line
        server.send_signal(signal.SIGTERM)  # or it would answer a little longer, and end by itself
        assert server.wait() == 128 + signal.SIGKILL
    why = "the engine stopped: its process was killed by SIGKILL (out of memory?)"
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["error"]["message"] == why
    for response in (answer, late):
        assert response.status_code == 503
        assert (response.json()["error"]["code"], response.json()["error"]["message"]) == ("engine_dead", why)
    assert why in log


def test_a_killed_rank_ends_streams_with_an_error_and_the_others(engine_config: EngineConfig) -> None:
    with process(engine_config.replace(multi_process=True, tensor_parallel_size=2)) as (server, url):
        lines: list[str] = []
        reader = stream(url, lines, **ENDLESS)
        until(lambda: bool(lines))
        (leader,) = children(server.pid)
        (rank,) = children(leader)
        os.kill(rank, signal.SIGKILL)
        reader.join()
        answer = httpx.get(f"{url}/health", timeout=None)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 1
        assert server.stdout is not None
        log = server.stdout.read()
    why = "the engine stopped: rank 1 (127.0.0.1) has gone"
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["error"]["message"] == why
    assert answer.status_code == 503 and answer.json()["error"]["message"] == why
    assert why in log and "Traceback" not in log


@pytest.mark.slow
def test_other_ranks_are_told_of_the_end(engine_config: EngineConfig) -> None:
    """Ranks that users or mpiexec start would else end as if rank 0 had died, or be aborted by JAX."""
    config = engine_config.replace(nnodes=2, tensor_parallel_size=2, master_port=free_port("127.0.0.1"))
    other = subprocess.Popen(serve_command(config.replace(node_rank=1)), stderr=subprocess.PIPE, text=True)
    try:
        with process(config) as (server, url):
            assert httpx.post(f"{url}/v1/completions", json={"prompt": [40]}, timeout=None).status_code == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        _, said = other.communicate()
    finally:
        other.kill()
        other.wait()
    assert other.returncode == 0 and "rank 0 has ended" in said


def listens_at(pid: int) -> set[str]:
    """Addresses at which a process takes connections, as /proc has them."""
    sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                found.add(local.split(":")[0][-8:])  # of an IPv6 address what is one of IPv4
    return found


@pytest.mark.slow
def test_ranks_listen_on_loopback_and_end_with_the_one_that_leads_them(engine_config: EngineConfig) -> None:
    with process(engine_config.replace(multi_process=True, tensor_parallel_size=2)) as (server, url):
        (leader,) = children(server.pid)
        (rank,) = children(leader)
        assert listens_at(server.pid) == listens_at(rank) == {"0100007F"}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": [40]}, timeout=None).status_code == 200
        server.kill()
        until_ended(rank)


def test_the_first_sigterm_of_another_rank_is_left_to_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        _end_with_rank_0()
        signal.raise_signal(signal.SIGTERM)
        assert caplog.messages == ["SIGTERM: this rank ends when rank 0 does; a second SIGTERM ends it at once"]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_bad_model_is_one_line_and_the_same_status_wherever_the_engine_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "serve", "--model", str(tmp_path), "--port", "0", "--engine-process"]
    results = [subprocess.run([*command, where], capture_output=True, text=True) for where in ("thread", "process")]
    assert [result.returncode for result in results] == [1, 1]
    *said, error = results[0].stderr.splitlines()
    assert error.startswith("llmjax: error: ") and all(" INFO " in line for line in said)
    assert results[1].stderr.splitlines()[-1] == error and results[1].stdout == results[0].stdout == ""


def test_a_server_whose_engine_has_died_ends_by_itself(
    engine_config: EngineConfig,
    start_server: Callable[[EngineConfig, ServerConfig], tuple[Any, Callable[[], None]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmjax.serve.server.DEAD_SECONDS", 0.2)
    running, stop = start_server(engine_config, ServerConfig(port=0))
    try:

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("the device is on fire")

        monkeypatch.setattr(running.engine.client.engine.runner, "dispatch", fail)
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": [40]}, timeout=None)
        assert answer.status_code == 503 and "on fire" in answer.json()["error"]["message"]
        until(lambda: running.server.should_exit)
        assert running.engine.exit_status == 1
    finally:
        stop()


HANGING = """
import re, sys
from llmjax import AsyncLLM
from llmjax.serve.__main__ import main

async def shutdown(*_, **__):
    re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter for years

AsyncLLM.shutdown = shutdown
sys.exit(main())
"""


@pytest.mark.slow
def test_a_server_that_hangs_ends_by_the_clock(engine_config: EngineConfig) -> None:
    with process(engine_config, "--shutdown-timeout", "1", program=("-c", HANGING)) as (server, _):
        server.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGALRM


COUNTING = """
import gc, os, sys
from llmjax import AsyncLLM
from llmjax.serve.__main__ import main

shutdown = AsyncLLM.shutdown

async def count(*args, **kwargs):
    print(f"{gc.get_freeze_count()} of {gc.get_freeze_count() + len(gc.get_objects())} are put aside", flush=True)
    await shutdown(*args, **kwargs)

AsyncLLM.shutdown = count
sys.exit(main())
"""


@pytest.mark.slow
def test_what_was_built_at_start_is_never_searched_for_garbage(engine_config: EngineConfig) -> None:
    with process(engine_config, program=("-c", COUNTING)) as (server, _):
        server.send_signal(signal.SIGTERM)
        assert server.stdout is not None
        counts = re.search(r"(\d+) of (\d+) are put aside", server.stdout.read())
        assert server.wait() == 0
    assert counts is not None and int(counts[1]) > int(counts[2]) / 2


def test_busy_port_is_one_line_before_the_model_is_touched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "serve", "--model", str(tmp_path / "absent"), "--port", str(port)]
        result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    error, hint = result.stderr.splitlines()[-2:]
    assert error == f"llmjax: error: port {port} on 127.0.0.1 is in use"
    assert hint == "  hint: end what listens there, or choose another with --port (0: any that is free)"
    assert result.stderr.strip().count("\n") == 1 and result.stdout == ""


def test_bind_errors_name_their_cause(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        bind(ServerConfig(host="no.such.host.invalid"))
    plain = tmp_path / "file"
    plain.write_text("")
    with pytest.raises(ConfigError, match="is not a socket"):
        bind(ServerConfig(uds=str(plain)))
    with pytest.raises(ConfigError, match="ssl_keyfile: k cannot be read"):
        check_tls(ServerConfig(ssl_keyfile="k", ssl_certfile="c"))


def test_unix_socket_left_behind_is_taken_over_but_not_a_live_one(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "s"))
    bind(config).close()
    with bind(config) as live:
        live.listen()
        with pytest.raises(ConfigError, match="another server listens"):
            bind(config)
