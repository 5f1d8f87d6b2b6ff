"""Several models in one server: every API's choice, what is shown of them, and waiting for one to be loaded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmjax.config import EngineConfig, ServerConfig
from llmjax.serve.models import Entry
from llmjax.serve.routes.models import card_of
from tests.pooled_models import write_with_tokenizer
from tests.serve.several import EACH, Several, served, start_several
from tests.waiting import until

KEY = "the-key"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def several(
    engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str
) -> Iterator[Several]:
    """A generator that stays, and an embedder and a reranker beside which there is room for one of them."""
    folder = tmp_path_factory.mktemp("models")
    shared = ServerConfig(port=0, api_key=[KEY], sse_keep_alive_interval=0.05, max_request_bytes=2**20)
    small = engine_config.replace(kv_cache_memory_bytes=2**20)

    def pooled(name: str) -> EngineConfig:
        path = write_with_tokenizer(name, folder, ends=name == "bert-cls")
        return small.replace(model=str(path), max_model_len=None, page_size=4, kv_cache_memory_bytes=None)

    models = [
        served("chat", small, shared, pinned=True),
        served("embed", pooled("qwen3-embedding"), shared, load="demand", keep_alive=300.0),
        served("rank", pooled("bert-reranker"), shared, load="demand"),
    ]
    running, stop = start_several(models, shared)
    yield running
    stop()


@pytest.fixture
def client(several: Several) -> Iterator[httpx.Client]:
    with several.http(headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": [40, 41], "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/embeddings": {"input": "w5 w6"},
    "/pooling": {"input": "w5 w6"},
    "/rerank": {"query": "w5", "documents": ["w6", "w7"]},
    "/score": {"text_1": "w5", "text_2": "w6"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/completions/render": {"prompt": "Hello"},
    "/invocations": {"messages": HELLO, "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [40, 41], "sampling_params": {"max_tokens": 2}},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": 2}, "stream": False},
    "/api/embed": {"input": "w5 w6"},
}
OF_EMBEDDER = frozenset({"/v1/embeddings", "/pooling", "/api/embed"})
OF_RERANKER = frozenset({"/rerank", "/score"})


@pytest.mark.parametrize("path", REQUESTS)
def test_every_api_names_its_model(client: httpx.Client, several: Several, path: str) -> None:
    model = "embed" if path in OF_EMBEDDER else "rank" if path in OF_RERANKER else "chat"
    answer = client.post(path, json={"model": model, **REQUESTS[path]})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if isinstance(body, dict) and "model" in body:
        assert body["model"] == model
    assert several.states()[model] == "loaded"
    unknown = client.post(path, json={"model": "other", **REQUESTS[path]})
    assert unknown.status_code == 404
    assert "this server has `chat`, `embed`, `rank`" in unknown.text


@pytest.mark.parametrize("path", sorted(REQUESTS.keys() - OF_EMBEDDER - OF_RERANKER))
def test_without_a_name_it_is_the_first_model(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=REQUESTS[path]).status_code == 200


def test_a_model_that_does_something_else_says_so(client: httpx.Client) -> None:
    wrong = client.post("/v1/embeddings", json={"model": "chat", "input": "w5"}).json()
    assert wrong["error"]["code"] == "unsupported_task"
    typed = client.post("/v1/completions", json={"model": 5, "prompt": [40]})
    assert (typed.status_code, typed.json()["error"]["param"]) == (400, "model")


def test_all_models_are_listed_with_their_states(client: httpx.Client) -> None:
    client.post("/v1/embeddings", json={"model": "embed", "input": "w5"})
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == ["chat", "embed", "rank"]
    assert [cards[name]["state"] for name in ("chat", "embed")] == ["loaded", "loaded"]
    assert cards["chat"]["pinned"] is True and cards["chat"]["expires_in"] is None
    assert cards["embed"]["pinned"] is False and 0 < cards["embed"]["expires_in"] <= 300
    assert client.get("/v1/models/rank").json()["state"] == "unloaded"
    assert client.get("/v1/models/other").status_code == 404
    tags = {card["name"]: card for card in client.get("/api/tags").json()["models"]}
    assert set(tags) == {"chat", "embed", "rank"} and tags["chat"]["size"] > 0
    running = {card["name"]: card["expires_at"] for card in client.get("/api/ps").json()["models"]}
    assert set(running) == {"chat", "embed"} and running["chat"].startswith("2318")
    assert not running["embed"].startswith("2318")
    shown = client.post("/api/show", json={"model": "embed:latest"}).json()
    assert shown["capabilities"] == ["embedding"]
    assert client.get("/").text.startswith("llmjax") and "chat, embed, rank" in client.get("/").text


def test_adapters_are_listed_before_their_model_is_loaded() -> None:
    config = EngineConfig(lora_modules=["sql=adapters/sql", '{"name": "chat", "path": "a", "base_model_name": "base"}'])
    entry = Entry(name="m", names=("m",), config=config, state="unloaded", created=0)
    assert entry.listed == ("m", "sql", "chat") and entry.shown_name("sql") == "sql"
    assert [card_of(entry, name)["parent"] for name in entry.listed] == [None, "m", "base"]
    assert card_of(entry, "sql")["root"] == "sql"


def metrics(client: httpx.Client, name: str, **labels: str) -> dict[str, float]:
    return {
        sample.labels["model_name"]: sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


def test_metrics_carry_the_models_names(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"model": "chat", "prompt": [40], "max_tokens": 1})
    client.post("/score", json={"model": "rank", "text_1": "w5", "text_2": "w6"})
    assert metrics(client, "llmjax:model_state", state="loaded") == {"chat": 1, "embed": 0, "rank": 1}
    assert metrics(client, "llmjax:model_memory_bytes") == {"chat": EACH, "embed": 0, "rank": EACH}
    counts = metrics(client, "vllm:e2e_request_latency_seconds_count")
    assert counts["chat"] > 0 and counts["rank"] > 0
    assert metrics(client, "llmjax:model_loads_total")["chat"] == 1
    assert metrics(client, "vllm:cache_config_info").keys() >= {"chat", "rank"}
    assert client.get("/health").status_code == 200


def hold(several: Several, model: str) -> threading.Event:
    """Has the next loading of a model wait; a model that is loaded goes first."""
    with several.http(headers={"authorization": f"Bearer {KEY}"}) as client:
        answer = client.post("/api/generate", json={"model": model, "keep_alive": 0})
    assert answer.json()["done_reason"] == "unload"
    assert several.states()[model] == "unloaded"
    gate = several.gates[model]
    gate.clear()
    return gate


def waited(several: Several, model: str, path: str, body: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The lines of a stream whose model is loaded once it has given a sign of life: those before, and the answer's."""
    several.gates[model].clear()
    headers = {"authorization": f"Bearer {KEY}"}
    request = {"model": model, "stream": True, **body}
    with several.http(headers=headers) as client, client.stream("POST", path, json=request) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_text()
        first = next(pieces)
        until(lambda: several.states()[model] == "loading")  # others may have to go first
        several.gates[model].set()
        text = first + "".join(pieces)
    kind = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
    assert answer.headers["content-type"].startswith(kind)
    if path.startswith("/api/"):
        assert text.startswith(" ")
        return [], text.splitlines()
    lines = [line for line in text.splitlines() if line]
    signs = [line for line in lines if line == ": keep-alive"]
    assert signs and lines[0] == signs[0]
    return signs, [line for line in lines if line not in signs]


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": [40, 41], "max_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": 2}},
}


@pytest.mark.parametrize("path", STREAMS)
def test_what_fails_after_a_sign_of_life_is_an_error_in_the_stream(several: Several, path: str) -> None:
    """The reranker writes nothing."""
    hold(several, "rank")
    _, lines = waited(several, "rank", path, STREAMS[path])
    if path.startswith("/api/"):
        (line,) = lines
        assert set(json.loads(line)) == {"error"}
        return
    openai = path in ("/v1/chat/completions", "/v1/completions")
    assert (lines[-1] == "data: [DONE]") is openai
    assert (lines[0] == "event: error") is not openai
    data = json.loads(lines[0 if openai else 1].removeprefix("data: "))
    if path == "/v1/responses":
        assert data["type"] == "error" and data["message"]
    else:
        assert data["error"]["type"] == "invalid_request_error" and data["error"]["message"]


def test_requests_that_are_no_streams_wait_in_silence(several: Several, client: httpx.Client) -> None:
    gate = hold(several, "embed")
    answers: list[httpx.Response] = []

    def ask() -> None:
        with several.http(headers={"authorization": f"Bearer {KEY}"}) as own:
            answers.append(own.post("/v1/embeddings", json={"model": "embed", "input": "w5 w6"}))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: several.pool.models["embed"].waiting == 3)
    assert metrics(client, "llmjax:model_requests_waiting")["embed"] == 3
    gate.set()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 3


def test_a_client_that_leaves_wants_nothing_any_more(several: Several) -> None:
    gate = hold(several, "embed")
    asking = HTTPConnection(urlsplit(several.url).netloc)
    with closing(asking):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        asking.request("POST", "/v1/embeddings", json.dumps({"model": "embed", "input": "w5"}), headers)
        until(lambda: several.pool.models["embed"].waiting == 1)
    until(lambda: several.pool.models["embed"].waiting == 0)
    gate.set()
    until(lambda: several.pool.models["embed"].bringing is None)


@pytest.mark.parametrize("path", ["/completion", "/apply-template", "/api/generate"])
def test_curl_as_it_comes_finds_its_model(path: str, client: httpx.Client) -> None:
    """Without a Content-Type of JSON, where clients of these APIs send none."""
    said = {"messages": [{"role": "user", "content": "a"}]} if path == "/apply-template" else {"prompt": "a"}
    body = json.dumps({"model": "chat", "stream": False, **said})
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.post(path, content=body, headers=headers)
    assert answer.status_code == 200, answer.text


def test_a_model_stays_as_long_as_ollamas_clients_ask(several: Several, client: httpx.Client) -> None:
    for keep_alive, expires in (("10m", 600), (-1, None), ("90s", 90)):
        body = {"model": "embed", "input": "w5 w6", "keep_alive": keep_alive}
        answer = client.post("/api/embed", json=body)
        assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers
        left = client.get("/v1/models/embed").json()["expires_in"]
        assert left is None if expires is None else expires - 30 < left <= expires
    client.post("/api/embed", json={"model": "embed", "input": "w5 w6", "keep_alive": 0})
    until(lambda: several.states()["embed"] == "unloaded")
    wrong = client.post("/api/embed", json={"model": "embed", "input": "w5", "keep_alive": "soon"})
    assert wrong.status_code == 400 and "keep_alive" in wrong.json()["error"]
    pinned = client.post("/api/generate", json={"model": "chat", "keep_alive": 0}).json()
    assert pinned["done_reason"] == "load" and several.states()["chat"] == "loaded"


def test_operators_name_the_model(several: Several, client: httpx.Client) -> None:
    hold(several, "rank").set()
    assert client.post("/sleep?model=rank").json()["error"]["code"] == "model_not_loaded"
    client.post("/v1/embeddings", json={"model": "embed", "input": "w5"})
    assert client.post("/sleep?model=embed").status_code == 200
    assert several.states() == {"chat": "loaded", "embed": "sleeping", "rank": "unloaded"}
    assert client.get("/is_sleeping?model=embed").json() == {"is_sleeping": True}
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    asleep = client.post("/v1/embeddings", json={"model": "embed", "input": "w5"})
    assert (asleep.status_code, asleep.json()["error"]["code"]) == (503, "asleep")
    assert client.post("/wake_up?model=embed").status_code == 200
    assert client.post("/v1/embeddings", json={"model": "embed", "input": "w5"}).status_code == 200
    assert client.get("/server_info?model=embed").json()["engine"]["model_name"] == "embed"
    assert client.post("/reset_prefix_cache?model=chat").status_code == 200
    assert client.post("/abort_requests", json={}).json()["status"] == "aborted"
    assert client.post("/sleep?model=other").status_code == 404


def test_batches_ask_the_models_that_their_lines_name(client: httpx.Client) -> None:
    lines = [
        {"custom_id": "one", "method": "POST", "url": "/v1/embeddings", "body": {"model": "embed", "input": "w5"}},
        {"custom_id": "two", "method": "POST", "url": "/v1/embeddings", "body": {"model": "other", "input": "w5"}},
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=body).json()
    until(lambda: client.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")
    done = client.get(f"/v1/batches/{batch['id']}").json()
    assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


def test_a_response_in_the_background_keeps_its_model(client: httpx.Client, several: Several) -> None:
    body = {"model": "chat", "input": "Hello", "background": True, "max_output_tokens": 4}
    response = client.post("/v1/responses", json=body).json()
    until(lambda: client.get(f"/v1/responses/{response['id']}").json()["status"] in ("completed", "incomplete"))
    until(lambda: several.pool.models["chat"].leases == 0)


@pytest.fixture(scope="module")
def lone(engine_config: EngineConfig) -> Iterator[Several]:
    """A server whose only model comes and goes."""
    shared = ServerConfig(port=0, api_key=[KEY], sse_keep_alive_interval=0.05)
    running, stop = start_several([served("only", engine_config, shared, load="demand")], shared)
    yield running
    stop()


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_waits_for_its_model_shows_signs_of_life(lone: Several, path: str) -> None:
    hold(lone, "only")
    _, lines = waited(lone, "only", path, STREAMS[path])
    if path.startswith("/api/"):
        assert json.loads(lines[-1])["done_reason"] == "length"
    elif path == "/v1/messages":
        assert lines[-2] == "event: message_stop"
    elif path == "/v1/responses":
        assert lines[-2] == "event: response.incomplete"
    else:
        assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"


def test_waiting_ends_with_an_error_that_says_when_to_ask_again(lone: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = hold(lone, "only")
    monkeypatch.setattr(lone.pool, "patience", 0.2)
    with lone.http(headers={"authorization": f"Bearer {KEY}"}) as client:
        late = client.post("/v1/completions", json={"prompt": [40], "max_tokens": 1})
        assert late.status_code == 503 and int(late.headers["retry-after"]) > 0
        assert late.json()["error"]["code"] == "model_unavailable"
        assert "the model only could not be loaded within 0.2 s" in late.text
        gate.set()
        monkeypatch.undo()
        assert client.post("/v1/completions", json={"prompt": [40], "max_tokens": 1}).status_code == 200
        assert client.get("/health").status_code == 200
