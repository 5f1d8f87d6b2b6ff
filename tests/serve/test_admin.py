"""What operators ask of a running server."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.engine.clients.client import Control
from tests.waiting import until

KEY = "the-key"
HELLO = [{"role": "user", "content": "Hello"}]
TRIES = 50  # a request may end by itself before it is aborted


@pytest.fixture(scope="module")
def guarded(engine_config: EngineConfig, start_server: Any) -> Iterator[Any]:
    server, stop = start_server(engine_config, ServerConfig(port=0, api_key=[KEY]))
    yield server
    stop()


@pytest.fixture
def admin(guarded: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=None, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    [
        *("/reset_prefix_cache", "/abort_requests", "/sleep", "/wake_up", "/start_profile", "/stop_profile"),
        *("/pause", "/resume", "/reset_mm_cache", "/reset_encoder_cache"),
    ],
)
def test_a_key_is_needed(http: httpx.Client, guarded: Any, path: str) -> None:
    assert http.post(path, json={}).json()["error"]["code"] == "key_needed"
    assert httpx.post(guarded.url + path, json={}, timeout=None).status_code == 401


def cached(client: httpx.Client) -> int:
    body = {"prompt": list(range(40, 104)), "max_tokens": 1}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_cached_prefixes_are_forgotten(admin: httpx.Client) -> None:
    cached(admin)
    assert cached(admin) > 0
    assert admin.post("/reset_prefix_cache").status_code == 200
    assert cached(admin) == 0


def aborted(admin: httpx.Client, body: dict[str, Any], headers: dict[str, str]) -> tuple[bool, bool]:
    """Whether two requests, of which the first has the headers, were aborted while they ran."""
    ends: dict[str, bool] = {}
    running = threading.Barrier(3)

    def ask(name: str, **more: Any) -> None:
        fields = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with admin.stream("POST", "/v1/completions", json=fields, **more) as response:
            lines = response.iter_lines()
            next(lines)
            running.wait()
            ends[name] = any("aborted" in line for line in lines)

    threads = [
        threading.Thread(target=ask, args=("first",), kwargs={"headers": headers}),
        threading.Thread(target=ask, args=("second",)),
    ]
    for thread in threads:
        thread.start()
    running.wait()
    answer = admin.post("/abort_requests", json=body).json()
    assert answer["status"] == "aborted" and 0 <= answer["aborted"] <= 2
    for thread in threads:
        thread.join()
    return ends["first"], ends["second"]


@pytest.mark.parametrize("id", ["mine", "cmpl-mine"])
def test_a_request_is_aborted_by_its_id(admin: httpx.Client, id: str) -> None:
    for _ in range(TRIES):
        first, second = aborted(admin, {"request_ids": [id]}, {"x-request-id": "mine"})
        assert not second
        if first:
            return
    pytest.fail("it was never aborted")


def test_all_requests_are_aborted(admin: httpx.Client, guarded: Any) -> None:
    assert any(all(aborted(admin, {}, {})) for _ in range(TRIES))
    guarded.wait_idle()


def test_wrong_ids_are_refused(admin: httpx.Client) -> None:
    assert admin.post("/abort_requests", json={"request_ids": "x"}).json()["error"]["param"] == "request_ids"


def sleep_states(admin: httpx.Client) -> dict[str, float]:
    """``vllm:engine_sleep_state``; exactly one is 1."""
    found = re.findall(r'^vllm:engine_sleep_state\{.*sleep_state="(\w+)"\} (\S+)$', admin.get("/metrics").text, re.M)
    states = {name: float(value) for name, value in found}
    assert sorted(states.values()) == [0, 0, 1]
    return states


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_and_is_woken(guarded: Any, admin: httpx.Client, level: int) -> None:
    body = {"prompt": "the", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    before = admin.post("/v1/completions", json=body).json()["choices"]
    assert admin.post("/sleep", params={"level": level}).status_code == 200
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    assert sleep_states(admin)[{1: "weights_offloaded", 2: "discard_all"}[level]] == 1
    answer = admin.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "asleep")
    assert "retry-after" in answer.headers and "wake_up" in answer.json()["error"]["message"]
    with admin.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as stream:
        assert stream.status_code == 503
    assert admin.get("/health").status_code == 200
    assert admin.post("/wake_up", params={"tags": "weights"}).status_code == 200
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    assert admin.post("/wake_up", params={"tags": ["weights", "kv_cache"]}).status_code == 200
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}
    assert sleep_states(admin) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert admin.post("/v1/completions", json=body).json()["choices"] == before


@pytest.mark.parametrize(("mode", "status"), [("abort", 503), ("wait", 200)])
def test_requests_before_a_server_sleeps(guarded: Any, admin: httpx.Client, mode: str, status: int) -> None:
    found: list[httpx.Response] = []
    body = {"prompt": "the", "max_tokens": 300, "ignore_eos": True}
    asking = threading.Thread(target=lambda: found.append(admin.post("/v1/completions", json=body)))
    asking.start()
    until(lambda: guarded.engine.num_requests or not asking.is_alive())
    assert admin.post("/sleep", params={"mode": mode}).status_code == 200
    asking.join()
    assert found[0].status_code in (status, 200)  # it may have ended before
    assert guarded.engine.num_requests == 0 and guarded.engine.kv_stats().used == 0
    assert admin.post("/wake_up").status_code == 200


def test_a_search_that_is_put_to_sleep_ends(guarded: Any, admin: httpx.Client) -> None:
    found: list[httpx.Response] = []
    body = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "use_beam_search": True, "n": 3}
    asking = threading.Thread(target=lambda: found.append(admin.post("/v1/completions", json=body)))
    asking.start()
    until(lambda: guarded.engine.num_requests or not asking.is_alive())
    assert admin.post("/sleep").status_code == 200
    asking.join()
    assert found[0].status_code in (200, 503)
    assert admin.post("/wake_up").status_code == 200
    assert admin.post("/v1/completions", json={**body, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("path", "params", "param"),
    [
        ("/sleep", {"level": "3"}, "level"),
        ("/sleep", {"mode": "keep"}, "mode"),
        ("/sleep", {"mode": "x" * 10**4}, "mode"),
        ("/wake_up", {"tags": "scheduling"}, "tags"),
        ("/pause", {"mode": "stop"}, "mode"),
        ("/pause", {"clear_cache": "perhaps"}, "clear_cache"),
        ("/start_profile", {}, None),
        ("/stop_profile", {}, None),
    ],
)
def test_what_operators_cannot_have(admin: httpx.Client, path: str, params: dict[str, str], param: str | None) -> None:
    answer = admin.post(path, params=params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}
    assert admin.get("/is_paused").json() == {"is_paused": False}


ENDLESS = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def begun(guarded: Any, admin: httpx.Client, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    """A request that the engine has, unless it has ended already, and where its answer will be."""
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(admin.post("/v1/completions", json=body)))
    thread.start()
    until(lambda: guarded.engine.num_requests or not thread.is_alive())
    return thread, found


def settled(guarded: Any) -> int:
    """Tokens that the engine has made, once no step runs and none will."""
    until(lambda: guarded.engine.client.engine.idle)
    guarded.engine.client.control(Control.PING).result()  # the step before it has been read, and told to the loop
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), guarded.loop).result()
    return int(guarded.engine.stats.generation_tokens)


def test_running_requests_are_kept_and_go_on(guarded: Any, admin: httpx.Client) -> None:
    whole = admin.post("/v1/completions", json=ENDLESS).json()["choices"][0]["text"]
    for _ in range(TRIES):
        running, kept = begun(guarded, admin, ENDLESS)
        assert admin.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        made = settled(guarded)
        if guarded.engine.num_requests:
            break
        running.join()
        assert admin.post("/resume").json() == {"status": "resumed"}
    else:
        pytest.fail("every request ended before it was paused")
    assert admin.get("/is_paused").json() == {"is_paused": True}
    assert admin.get("/health").status_code == 200
    refused = admin.post("/pause", params={"mode": "wait"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mode")
    assert admin.post("/sleep", params={"mode": "wait"}).status_code == 400
    later, answer = begun_later(guarded, admin, {**ENDLESS, "max_tokens": 4})
    assert settled(guarded) == made and running.is_alive() and later.is_alive()
    assert guarded.engine.num_requests == 1  # the other one is not the engine's yet
    assert admin.post("/resume").json() == {"status": "resumed"}
    running.join()
    later.join()
    assert kept[0].json()["choices"][0]["text"] == whole
    assert answer[0].json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(("query", "status"), [({}, 503), ({"wait_for_inflight_requests": "true"}, 200)])
def test_requests_before_a_pause_end(guarded: Any, admin: httpx.Client, query: dict[str, str], status: int) -> None:
    assert cached(admin) >= 0
    running, found = begun(guarded, admin, ENDLESS)
    assert admin.post("/pause", params=query).status_code == 200
    running.join()
    assert found[0].status_code in (status, 200) and guarded.engine.num_requests == 0  # it may have ended before
    later, answer = begun_later(guarded, admin, {"prompt": list(range(40, 104)), "max_tokens": 1})
    assert later.is_alive() and admin.get("/is_paused").json() == {"is_paused": True}
    deferred = re.search(r'by_reason\{.*reason="deferred"\} (\S+)', admin.get("/metrics").text)
    assert deferred is not None and float(deferred[1]) == guarded.engine.num_held_back == 1
    assert admin.post("/resume").status_code == 200
    later.join()
    assert answer[0].json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # what was cached is forgotten


def begun_later(
    guarded: Any, admin: httpx.Client, body: dict[str, Any]
) -> tuple[threading.Thread, list[httpx.Response]]:
    """A request that a paused server holds back, and where its answer will be."""
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(admin.post("/v1/completions", json=body)))
    thread.start()
    until(lambda: guarded.engine.num_held_back == 1)
    return thread, found


def test_a_paused_server_bounds_what_waits(guarded: Any, admin: httpx.Client) -> None:
    limit = guarded.engine.config.max_num_seqs + guarded.engine.config.max_num_queued_reqs
    assert admin.post("/pause").status_code == 200
    waiting, _ = begun_later(guarded, admin, ENDLESS)
    guarded.engine._held_back += limit - 1  # as if that many had come
    try:
        answer = admin.post("/v1/completions", json=ENDLESS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
    finally:
        guarded.engine._held_back -= limit - 1
        assert admin.post("/resume").status_code == 200
    waiting.join()
    assert not waiting.is_alive()


def test_there_are_no_other_caches_to_forget(admin: httpx.Client) -> None:
    assert admin.post("/reset_mm_cache").status_code == admin.post("/reset_encoder_cache").status_code == 200


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/audio/transcriptions", "text"),
        ("/collective_rpc", "code in requests is never run"),
        ("/update_weights", "files"),
        ("/get_world_size", "files"),
        ("/fault_tolerance/status", "there is no /fault_tolerance/status here: an engine's process"),
        ("/v1/systemone", "/v1/chat/completions"),
        ("/api/copy", "served_model_name"),
        ("/api/create", "the file of --config"),
    ],
)
def test_routes_that_are_not_there_say_why(admin: httpx.Client, path: str, why: str) -> None:
    answer = admin.post(path, json={})
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert why in error if path.startswith("/api/") else error["code"] == "not_implemented" and why in error["message"]
    assert path not in admin.get("/openapi.json").json()["paths"]
