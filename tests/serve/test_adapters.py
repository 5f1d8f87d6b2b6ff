"""A real server whose requests name adapters: every API, loading and unloading, llama-server's factors, bad input."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from llmjax.bench import serve as bench_serve
from llmjax.config import EngineConfig, ServerConfig
from tests.serve.conftest import Running
from tests.tiny_adapters import write_adapter

OPERATOR = {"Authorization": "Bearer operator"}
PROMPT = {"prompt": "the end and the other", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Served(NamedTuple):
    server: Running
    root: Path
    model: Path

    def post(self, path: str, body: Any, *, headers: dict[str, str] | None = None) -> httpx.Response:
        with httpx.Client(base_url=self.server.url, timeout=None, headers=headers or OPERATOR) as client:
            return client.post(path, json=body)

    def get(self, path: str) -> Any:
        with httpx.Client(base_url=self.server.url, timeout=None, headers=OPERATOR) as client:
            return client.get(path).json()

    def text(self, model: str, **body: Any) -> str:
        answer = self.post("/v1/completions", {**PROMPT, "model": model, **body})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return str(answer.json()["choices"][0]["text"])

    def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})

    def unload(self, name: str, **more: Any) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name, **more})


@pytest.fixture(scope="module")
def served(
    engine_config: EngineConfig,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    start_server: Callable[..., tuple[Running, Callable[[], None]]],
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "chat", "third", "fixed", "fixed2"), 1):
        write_adapter(root / name, tiny_model, seed=seed)
    write_adapter(root / "wide", tiny_model, seed=6, rank=32)
    write_adapter(root / "other-base", tiny_model, seed=7, hidden=48)
    modules = [
        f"sql={root / 'sql'}",
        json.dumps({"name": "chat", "path": str(root / "chat"), "base_model_name": "org/m"}),
    ]
    config = replace(
        engine_config,
        lora_modules=modules,
        lora_scaled=[f"{root / 'fixed'}:1.5", f"{root / 'fixed2'}:1"],
        lora_init_without_apply=True,
        max_loras=2,
        max_lora_rank=8,
    )
    keys = {"admin_key": ["operator"], "api_key": ["client"], "cache_salt_per_key": False}
    server, stop = start_server(config, ServerConfig(port=0, lora_root=str(root), **keys))
    yield Served(server, root, tiny_model)
    stop()


def test_each_name_has_its_own_answers(served: Served) -> None:
    texts = {name: served.text(name) for name in ("tiny-llama", "sql", "chat")}
    assert len(set(texts.values())) == 3
    assert {name: served.text(name) for name in texts} == texts  # from cached pages too
    streamed = [threading.Thread(target=lambda n=name: served.text(n)) for name in [*texts] * 3]
    for thread in streamed:
        thread.start()
    for thread in streamed:
        thread.join()
    assert {name: served.text(name) for name in texts} == texts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}}),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "hi"}], "stream": False, "options": {"num_predict": 3}},
        ),
        ("/api/generate", {"prompt": "hi", "stream": False, "options": {"num_predict": 3}}),
    ],
)
def test_every_api_answers_with_the_adapters_name(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = served.post(path, {**body, "model": "sql"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "sql"
    unknown = served.post(path, {**body, "model": "none"})
    assert unknown.status_code == 404
    assert "the model `none` does not exist" in unknown.text


def test_other_routes_know_the_names(served: Served) -> None:
    for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [5]})):
        assert served.post(path, {**body, "model": "chat"}).status_code == 200
        assert served.post(path, {**body, "model": "none"}).status_code == 404
    counted = {"messages": [{"role": "user", "content": "hi"}], "model": "sql"}
    assert served.post("/v1/messages/count_tokens", counted).status_code == 200
    names = [entry["name"] for entry in served.get("/api/tags")["models"]]
    assert names == ["tiny-llama", "sql", "chat"]
    assert served.post("/api/show", {"model": "sql"}).json()["details"]["parent_model"] == "tiny-llama"


def test_models_are_listed_with_their_parents(served: Served) -> None:
    cards = {card["id"]: card for card in served.get("/v1/models")["data"]}
    assert list(cards) == ["tiny-llama", "sql", "chat"]
    assert cards["tiny-llama"]["parent"] is None
    assert (cards["sql"]["root"], cards["sql"]["parent"]) == ("sql", "tiny-llama")
    assert cards["chat"]["parent"] == "org/m"
    assert served.get("/v1/models/sql")["id"] == "sql"


def test_adapters_are_loaded_and_unloaded(served: Served) -> None:
    answer = served.load("third", "third")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'third' added successfully.")
    third = served.text("third")
    assert third not in {served.text("tiny-llama"), served.text("sql")}
    again = served.load("third", "third")
    assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
    answer = served.unload("third")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'third' removed successfully.")
    assert served.post("/v1/completions", {**PROMPT, "model": "third"}).status_code == 404
    answer = served.unload("third")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The lora adapter 'third' cannot be found."
    assert served.load("third", str(served.root / "third")).status_code == 200  # an absolute path
    assert served.text("third") == third
    assert served.unload("third", lora_int_id=10**6).status_code == 404
    assert served.unload("third").status_code == 200


def test_another_content_under_the_same_name_finds_no_old_pages(served: Served) -> None:
    folder = write_adapter(served.root / "changing", served.model, seed=20)
    assert served.load("changing", "changing").status_code == 200
    old = served.text("changing", prompt="the end and the other and the end and the other", max_tokens=40)
    write_adapter(folder, served.model, seed=21)
    assert served.load("changing", "changing", load_inplace=True).status_code == 200
    new = served.text("changing", prompt="the end and the other and the end and the other", max_tokens=40)
    assert new != old
    write_adapter(folder, served.model, seed=20)
    assert served.load("changing", "changing", load_inplace=True).status_code == 200
    assert served.text("changing", prompt="the end and the other and the end and the other", max_tokens=40) == old
    assert served.unload("changing").status_code == 200


def test_requests_that_run_keep_the_adapter_that_is_replaced_or_unloaded(served: Served) -> None:
    folder = write_adapter(served.root / "used", served.model, seed=30)
    assert served.load("used", "used").status_code == 200
    long = {**PROMPT, "max_tokens": 200, "model": "used"}
    expected = served.post("/v1/completions", long).json()["choices"][0]["text"]
    with (
        httpx.Client(base_url=served.server.url, timeout=None, headers=OPERATOR) as client,
        client.stream("POST", "/v1/completions", json={**long, "stream": True}) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        pieces = [next(lines)]
        write_adapter(folder, served.model, seed=31)
        assert served.load("used", "used", load_inplace=True).status_code == 200
        replaced = served.text("used", max_tokens=20)
        assert served.unload("used").status_code == 200
        assert served.post("/v1/completions", long).status_code == 404
        pieces += lines
    text = "".join(json.loads(piece[6:])["choices"][0]["text"] for piece in pieces)
    assert text == expected and not expected.startswith(replaced)
    served.server.wait_idle()


@pytest.mark.parametrize(
    ("name", "path", "says"),
    [
        ("x", "nowhere", "there is no adapter at that path below the folder of --lora-root"),
        ("x", "../", "there is no adapter at that path"),
        ("x", "../../etc", "there is no adapter at that path"),
        ("x", "/etc", "there is no adapter at that path"),
        ("x", "outside", "there is no adapter at that path"),
        ("x", "half-outside", "there is no adapter at that path"),
        ("x", "sql\0", "there is no adapter at that path"),
        ("x", "pickled", "is pickled, so save the adapter as safetensors"),
        ("x", "wide", "max_lora_rank is 8"),
        ("x", "other-base", "48"),
        ("tiny-llama", "sql", "is the name of the model"),
        ("sql", "sql", "loaded already"),
        ("a\nb", "sql", "printable"),
    ],
)
def test_what_cannot_be_loaded(served: Served, tmp_path: Path, name: str, path: str, says: str) -> None:
    outside = write_adapter(tmp_path / "elsewhere", served.model, seed=9)
    links = {"outside": outside, "half-outside/adapter_model.safetensors": outside / "adapter_model.safetensors"}
    for link, target in links.items():
        (served.root / link).parent.mkdir(exist_ok=True)
        (served.root / link).unlink(missing_ok=True)
        os.symlink(target, served.root / link)
    (served.root / "half-outside/adapter_config.json").write_bytes((outside / "adapter_config.json").read_bytes())
    pickled = write_adapter(served.root / "pickled", served.model, seed=9)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    before = served.text("sql")
    answer = served.load(name, path)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert str(served.root) not in answer.text
    assert [card["id"] for card in served.get("/v1/models")["data"]] == ["tiny-llama", "sql", "chat"]
    assert served.text("sql") == before  # nothing is lost


def test_metrics_name_the_adapters_that_run(served: Served) -> None:
    read = served.server.http
    # More than run at once, so that it does not end before it is stopped, and some of its texts wait.
    long = {**PROMPT, "max_tokens": 480, "n": 32, "model": "sql", "stream": True}
    with read() as client, client.stream("POST", "/v1/completions", json=long, headers=OPERATOR) as answer:
        lines = answer.iter_lines()
        next(lines)
        with served.server.paused():
            running = client.get("/metrics").text
    served.server.wait_idle()
    assert served.text("tiny-llama")
    labels = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="%s",waiting_lora_adapters="%s"}'
    assert labels % ("sql", "sql") in running
    assert labels % ("", "") in read().get("/metrics").text


def test_the_benchmark_sends_requests_to_adapters(served: Served) -> None:
    line = f"--base-url {served.server.url} --api-key client --lora-modules sql chat --lora-assignment round-robin "
    line += "--num-prompts 4 --input-len 8 --random-vocab-size 200 --output-len 4 --num-warmups 1 --disable-tqdm"
    result = asyncio.run(bench_serve.run(bench_serve.parse(line.split())))
    assert (result.completed, result.failed) == (4, 0)
    line = line.replace("sql chat", "sql none")
    result = asyncio.run(bench_serve.run(bench_serve.parse(line.split())))
    assert (result.completed, result.failed) == (2, 2)


def test_only_operators_change_adapters(served: Served) -> None:
    client = {"Authorization": "Bearer client"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = served.post(path, {"lora_name": "x", "lora_path": "third"}, headers=client)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_needed")
    assert served.post("/lora-adapters", [], headers=client).status_code == 403
    assert served.post("/v1/completions", {**PROMPT, "model": "sql"}, headers=client).status_code == 200


def test_factors_of_llama_servers_adapters(served: Served) -> None:
    assert served.get("/lora-adapters") == [
        {"id": 0, "path": "fixed", "scale": 0.0},
        {"id": 1, "path": "fixed2", "scale": 0.0},
    ]
    plain = served.text("tiny-llama")
    own = served.text("tiny-llama", lora=[{"id": 0, "scale": 1.0}])
    both = served.text("tiny-llama", lora=[{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}])
    assert len({plain, own, both}) == 3
    assert served.text("tiny-llama") == plain
    answer = served.post("/lora-adapters", [{"id": 0, "scale": 1.0}])
    assert answer.json() == [{"id": 0, "path": "fixed", "scale": 1.0}, {"id": 1, "path": "fixed2", "scale": 0.0}]
    assert served.text("tiny-llama") == own
    assert served.text("tiny-llama", lora=[]) == plain
    assert served.post("/lora-adapters", []).status_code == 200
    assert served.text("tiny-llama") == plain


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"lora": [{"id": 2, "scale": 1}]}, "there is no adapter 2; --lora names 2"),
        ({"lora": [{"id": 0, "scale": 1}], "model": "sql"}, "cannot be combined with a model that is an adapter"),
        ({"lora": [{"id": 0, "scale": 1}, {"id": 0, "scale": 2}]}, "names an adapter twice"),
        ({"lora": [{"id": 0}]}, "`lora.0.scale` is required"),
        ({"lora": [{"id": "0", "scale": 1}]}, "`lora.0.id`"),
        ({"lora": 3}, "`lora`"),
    ],
)
def test_wrong_factors(served: Served, body: dict[str, Any], says: str) -> None:
    answer = served.post("/v1/completions", {**PROMPT, **body})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    if "model" not in body:
        assert served.post("/lora-adapters", body["lora"]).status_code == 400


def test_a_server_without_a_folder_loads_nothing(
    engine_config: EngineConfig, start_server: Callable[..., tuple[Running, Callable[[], None]]]
) -> None:
    server, stop = start_server(engine_config, ServerConfig(port=0, admin_key=["operator"]))
    try:
        with httpx.Client(base_url=server.url, timeout=None, headers=OPERATOR) as client:
            answer = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "y"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_enabled")
            assert client.get("/lora-adapters").json() == []
    finally:
        stop()
