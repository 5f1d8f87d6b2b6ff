"""POST /api/pull and DELETE /api/delete: Ollama's own clients, a server of several models, and hosts on loopback."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from llmjax.cli import main
from llmjax.config import EngineConfig, ServerConfig
from tests.pulled.hosts import Hosts, serving, sha256, tiny_gguf
from tests.serve.javascript import run_program
from tests.serve.several import Several, served, start_several
from tests.serve.test_wrong_types import check_fields, fields_of
from tests.waiting import until

KEY, ADMIN = "the-key", "the-admin-key"
PROMPT = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def hosts(model: bytes) -> Iterator[Hosts]:
    with serving() as hosts, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hosts.url)
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hosts


Start = Callable[[], tuple[Several, Callable[[], None]]]


@pytest.fixture(scope="module")
def start(engine_config: EngineConfig, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a server of one model by its settings, with the same folder of downloads each time."""
    downloads = tmp_path_factory.mktemp("downloads")

    def begin() -> tuple[Several, Callable[[], None]]:
        config = ServerConfig(port=0, api_key=[KEY], admin_key=[ADMIN], ollama_registry=hosts.url, model_timeout=3600.0)
        common = engine_config.replace(
            kv_cache_memory_bytes=2**20, download_dir=str(downloads), max_model_len=64, served_model_name=None
        )
        return start_several([served("fixed", common, config, load="demand")], config, common=common)

    return begin


@pytest.fixture(scope="module")
def several(start: Start) -> Iterator[Several]:
    running, stop = start()
    yield running
    stop()


@pytest.fixture
def client(several: Several) -> Iterator[ollama.Client]:
    with ollama.Client(host=several.url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=None) as client:
        yield client


@pytest.fixture(autouse=True)
def whole(hosts: Hosts, model: bytes) -> None:
    """Everything is there and comes at once."""
    for gate in hosts.gates.values():
        gate.set()
    for faults in (hosts.gates, hosts.other, hosts.cut, hosts.sizes):
        faults.clear()
    hosts.repositories["org/name"] = {"m-Q4_K_M.gguf": model, "m-Q8_0.gguf": model}
    layers = {"model": model, "template": b"{{ .Prompt }}", "params": b'{"temperature": 0.25, "num_ctx": 4096}'}
    hosts.publish("library/tiny:1b", layers)


def tokens(several: Several, name: str) -> list[int]:
    with several.http(headers={"authorization": f"Bearer {KEY}"}) as http:
        answer = http.post("/v1/completions", json={"model": name, "return_token_ids": True, **PROMPT})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def names(several: Several) -> set[str]:
    """What both APIs list."""
    with several.http(headers={"authorization": f"Bearer {KEY}"}) as http:
        listed = {card["id"] for card in http.get("/v1/models").json()["data"]}
        assert {card["name"] for card in http.get("/api/tags").json()["models"]} == listed
    return listed


@pytest.mark.parametrize("name", ["tiny:1b", "hf.co/org/name:Q8_0"])
def test_a_model_comes_serves_and_goes(
    several: Several, client: ollama.Client, model: bytes, tmp_path: Path, name: str
) -> None:
    steps = list(client.pull(name, stream=True))
    assert steps[0].status == "pulling manifest" and steps[-1].status == "success"
    files = [step for step in steps if step.digest == f"sha256:{sha256(model)}"]
    assert files and (files[-1].completed, files[-1].total) == (len(model), len(model))
    assert files[-1].status == f"pulling {sha256(model)[:12]}"
    assert names(several) == {"fixed", name}
    assert several.states()[name] == "unloaded"
    assert len(tokens(several, name)) == 3
    assert several.states()[name] == "loaded"
    shown = client.show(name)
    assert shown.details.format == "gguf" and ("temperature 0.25" in (shown.parameters or "")) == (name == "tiny:1b")
    client.delete(name)
    assert names(several) == {"fixed"} and name not in several.states()
    with pytest.raises(ollama.ResponseError, match="does not exist") as error:
        client.delete(name)
    assert error.value.status_code == 404


def test_what_was_pulled_is_there_after_a_restart(start: Start, client: ollama.Client, several: Several) -> None:
    client.pull("org/name")
    again, stop = start()
    try:
        assert names(again) == {"fixed", "org/name"}
        assert len(tokens(again, "org/name")) == 3
    finally:
        stop()
    client.delete("org/name")
    again, stop = start()
    assert names(again) == {"fixed"}
    stop()


def test_a_pull_of_what_is_there_brings_its_next_version(
    several: Several, client: ollama.Client, hosts: Hosts, tmp_path: Path
) -> None:
    client.pull("tiny:1b")
    first = tokens(several, "tiny:1b")
    loads = several.pool.models["tiny:1b"].loads
    client.pull("tiny:1b")
    assert tokens(several, "tiny:1b") == first and several.pool.models["tiny:1b"].loads == loads  # nothing has changed
    hosts.publish("library/tiny:1b", {"model": tiny_gguf(tmp_path / "next.gguf", scale=-1.0)})
    client.pull("tiny:1b")
    assert several.states()["tiny:1b"] == "unloaded"
    assert client.pull("fixed").status == "success"  # it is there
    client.delete("tiny:1b")


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("../etc", 400, "is not a name of a model to pull"),
        ("hf.co/../../etc", 400, "is not a name of a model to pull"),
        ("org/..", 400, "is not a name of a model to pull"),
        ("org/name:../x", 400, "not from 'org'"),
        ("evil.example/a/b", 400, "not from 'evil.example'; --ollama-registry names"),
    ],
)
def test_names_that_are_none(client: ollama.Client, name: str, status: int, why: str) -> None:
    with pytest.raises(ollama.ResponseError, match=why) as error:
        list(client.pull(name, stream=True))
    assert error.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="does not exist") as error:
        client.delete(name)
    assert error.value.status_code == 404


@pytest.mark.parametrize(
    ("name", "why", "stream"),
    [("tiny:7b", "is not in the registry", False), ("org/none", "is not on Hugging Face", True)],
)
def test_what_cannot_be_fetched_says_why(
    client: ollama.Client, several: Several, name: str, why: str, stream: bool
) -> None:
    with pytest.raises(ollama.ResponseError, match=why):
        list(client.pull(name, stream=stream))
    assert names(several) == {"fixed"}


def test_another_hash_is_an_error_and_nothing_joins(
    client: ollama.Client, several: Several, hosts: Hosts, model: bytes
) -> None:
    hosts.other[sha256(model)] = model[::-1]
    with pytest.raises(ollama.ResponseError, match=r"sha256 is .* the file was removed"):
        list(client.pull("tiny:1b", stream=True))
    assert names(several) == {"fixed"}


def test_only_operators_pull_and_delete(several: Several) -> None:
    for key, status in ((None, 401), (KEY, 403)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        with several.http(headers=headers) as http:
            assert http.post("/api/pull", json={"model": "tiny:1b"}).status_code == status
            assert http.request("DELETE", "/api/delete", json={"model": "fixed"}).status_code == status


@pytest.mark.parametrize(
    ("method", "path", "name"), [("POST", "/api/pull", "fixed"), ("DELETE", "/api/delete", "other")]
)
def test_values_of_all_kinds(
    several: Several, caplog: pytest.LogCaptureFixture, hosts: Hosts, model: bytes, method: str, path: str, name: str
) -> None:
    base = {"model": name, "stream": False}
    hosts.publish("library/x:latest", {"model": model})  # one of the values is its name
    with several.http(headers={"authorization": f"Bearer {ADMIN}"}) as http, caplog.at_level(logging.ERROR):
        assert check_fields(http, path, base, method=method) == []
        nulls = {field: None for field in fields_of(http, path, method=method) if field not in base}
        plain, given = (http.request(method, path, json=body) for body in (base, {**base, **nulls}))
        assert plain.status_code == given.status_code == (200 if name == "fixed" else 404), given.text
        if method == "POST":
            assert names(several) == {"fixed", "x"}
            http.request("DELETE", "/api/delete", json={"model": "x"}).raise_for_status()
    assert names(several) == {"fixed"}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_what_the_settings_name_is_not_deleted(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"fixed is named by the server's settings") as error:
        client.delete("fixed")
    assert error.value.status_code == 409


def test_what_has_been_removed_by_the_command_can_be_deleted(client: ollama.Client, several: Several) -> None:
    client.pull("tiny:1b")
    assert main(["rm", "tiny:1b", "--yes", "--download-dir", str(several.pulls._records.root.parent)]) == 0
    assert names(several) == {"fixed", "tiny:1b"}
    client.delete("tiny:1b")
    assert names(several) == {"fixed"}


def test_two_pulls_of_one_name_are_one(client: ollama.Client, several: Several, hosts: Hosts, model: bytes) -> None:
    gate = hosts.gates[sha256(model)] = threading.Event()
    before = len(hosts.asked)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(lambda: list(client.pull("tiny:1b", stream=True))) for _ in range(2)]
        until(lambda: followers(several) == 2)
        with pytest.raises(ollama.ResponseError, match="is being pulled") as error:
            client.delete("tiny:1b")
        assert error.value.status_code == 409
        gate.set()
        assert [one.result()[-1].status for one in both] == ["success", "success"]
    assert sum(sha256(model) in path for path in hosts.asked[before:]) == 1
    client.delete("tiny:1b")


def followers(several: Several) -> int:
    return sum(pull.followers for pull in several.pulls.running)


def test_a_pull_ends_when_its_last_client_goes_and_the_next_goes_on(
    client: ollama.Client, several: Several, hosts: Hosts, model: bytes
) -> None:
    gate = hosts.gates[sha256(model)] = threading.Event()
    headers = {"authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=several.url, headers=headers, timeout=None) as http:
        with http.stream("POST", "/api/pull", json={"model": "tiny:1b"}) as answer:
            steps = map(json.loads, answer.iter_lines())
            step: dict[str, Any] = {}
            while not step.get("completed"):
                step = next(steps)
        until(lambda: not several.pulls.running)
        assert names(several) == {"fixed"}
        hosts.gates.clear()
        gate.set()
        assert client.pull("tiny:1b").status == "success"
        client.delete("tiny:1b")
        # What has come of one that is never finished can be removed, too.
        gate = hosts.gates[sha256(model)] = threading.Event()
        before = len(hosts.asked)
        with http.stream("POST", "/api/pull", json={"model": "tiny:1b"}) as answer:
            lines = answer.iter_lines()  # dropping it would close the connection
            next(lines)
            until(lambda: any(sha256(model) in path for path in hosts.asked[before:]))
        until(lambda: not several.pulls.running)
        client.delete("tiny:1b")
        with pytest.raises(ollama.ResponseError, match="does not exist"):
            client.delete("tiny:1b")


def test_requests_that_run_end_before_their_model_goes(client: ollama.Client, several: Several) -> None:
    client.pull("tiny:1b")
    tokens(several, "tiny:1b")
    body = {"model": "tiny:1b", **PROMPT, "max_tokens": 50, "stream": True}
    headers = {"authorization": f"Bearer {KEY}"}
    with several.http(headers=headers) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        with ThreadPoolExecutor(1) as pool:
            deleted = pool.submit(client.delete, "tiny:1b")
            until(lambda: names(several) == {"fixed"})
            assert [line for line in lines if line][-1] == "data: [DONE]"
            deleted.result()
    assert "tiny:1b" not in several.states()


def test_a_program_in_javascript(several: Several) -> None:
    run_program("ollama_pull.mjs", several.url, ADMIN, package="ollama")
    assert names(several) == {"fixed"}
