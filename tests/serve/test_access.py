"""Keys, host names, origins, and what answers say about this machine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.engine.front.adapters import AdapterRegistry
from llmjax.engine.info import EngineState
from llmjax.errors import ConfigError
from llmjax.serve.app import create_app
from llmjax.serve.context import engine_id, is_of
from llmjax.serve.routes.admin import ADMIN_ROUTES
from llmjax.serve.routes.models import card_of


class Idle:
    """An engine that is asked for nothing."""

    tokenizer = None
    states = (EngineState(serving=True),)
    sleep_state = "awake"
    num_held_back = 0

    def __init__(self, model: str = "m", name: str = "m") -> None:
        self.config = EngineConfig(model=model)
        self.adapters = AdapterRegistry(self.config, names=[name])
        self.info = SimpleNamespace(
            vocab_size=100,
            max_model_len=64,
            kv_tokens=640,
            page_size=32,
            model_name=name,
            default_sampling_params={},
            pooler=None,
            vision=None,
            drafts=0,
        )

    is_sleeping = is_paused = False

    def check_health(self) -> None: ...

    def add_stat_logger(self, logger: Any) -> None: ...


def app_of(**settings: Any) -> Any:
    return create_app(Idle(), ServerConfig(**settings))  # type: ignore[arg-type]


def ask(app: Any, method: str, path: str, *, url: str = "http://localhost", **options: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client:
            return await client.request(method, path, **options)

    return asyncio.run(main())


def bearer(value: str) -> dict[str, str]:
    return {"Authorization": value}


GUARDED = [
    ("GET", "/v1"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/embeddings"),
    ("POST", "/completion"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("POST", "/rerank"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/score"),
    ("POST", "/v1/score"),
    ("POST", "/classify"),
    ("POST", "/pooling"),
    ("GET", "/no-such-path"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_paths_that_need_a_key(method: str, path: str) -> None:
    app = app_of(api_key=["one", "two", "drei-ß"])
    wrong = [{}, *map(bearer, ("Bearer wrong", "Basic one", "one", "Bearer ", "Bearer", "Bearer onetwo"))]
    for headers in wrong:
        response = ask(app, method, path, headers=headers)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key" and response.headers["x-request-id"]
    for key in ("one", "two", "drei-ß"):
        assert ask(app, method, path, headers={"Authorization": f"Bearer {key}".encode()}).status_code != 401


def test_probes_stay_open_and_status_pages_may_be_guarded() -> None:
    for guarded in (False, True):
        app = app_of(api_key=["one"], guard_metrics=guarded, web=False)
        for path in ("/health", "/ping"):
            assert ask(app, "GET", path).status_code == 200
        for path in ("/", "/metrics", "/version"):
            assert ask(app, "GET", path).status_code == (401 if guarded else 200)
            assert ask(app, "GET", path, headers=bearer("Bearer one")).status_code == 200


def test_a_prefix_of_a_proxy_does_not_open_a_path() -> None:
    app = app_of(api_key=["one"])
    transport = httpx.ASGITransport(app, root_path="/llm")

    async def main() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [(await client.get(path)).status_code for path in ("/llm/health", "/llm/v1/models", "/llm/tokenize")]

    assert asyncio.run(main()) == [200, 401, 401]


def test_a_proxy_may_leave_its_prefix_on_a_path_or_take_it_off() -> None:
    """The same as with uvicorn, which puts the prefix in front of every path."""
    app = app_of(root_path="/llm", api_key=["one"])
    transport = httpx.ASGITransport(app, root_path="/llm")

    async def main() -> dict[str, int]:
        key = bearer("Bearer one")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/llm", headers=key) as client:
            paths = ("/v1/models", "/llm/v1/models", "/llm/openapi.json", "/llm/llm/v1/models", "/llmv1/models", "/llm")
            document = (await client.get("/llm/openapi.json")).json()
            assert document["servers"] == [{"url": "/llm"}]
            client.headers.pop("authorization")
            assert (await client.get("/llm/health")).status_code == 200
            assert (await client.get("/llm/v1/models")).status_code == 401
            client.headers.update(key)
            return {path: (await client.get(path)).status_code for path in paths}

    assert asyncio.run(main()) == {
        "/v1/models": 200,
        "/llm/v1/models": 200,
        "/llm/openapi.json": 200,
        "/llm/llm/v1/models": 404,
        "/llmv1/models": 404,
        "/llm": 307,  # to /llm/
    }
    with pytest.raises(ConfigError, match="root_path must begin with /"):
        ServerConfig(root_path="llm")


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/responses", "/v1/responses"),
        ("GET", "/models/x/y", "/v1/models/x/y"),
        ("POST", "/v1/v1/messages", "/v1/messages"),
        ("POST", "/v1/tokenize", "/tokenize"),
        ("GET", "/chat/completions", None),
        ("POST", "/nothing", None),
    ],
)
def test_a_path_that_is_not_there_hints_at_one_that_is(method: str, path: str, hint: str | None) -> None:
    message = ask(app_of(), method, path).json()["error"]["message"]
    assert message == f"there is no {method} {path}" + (f"; did you mean {hint}?" if hint else "")


@pytest.mark.parametrize("keys", [[""], ["good", ""], [" "], ["a "], "text"])
def test_keys_that_no_client_could_send_are_refused(keys: Any) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        ServerConfig(api_key=keys)


def test_a_page_of_another_origin_gets_no_permission_by_default() -> None:
    origin = {"Origin": "https://evil.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    closed = app_of()
    for method, headers in (("OPTIONS", preflight), ("GET", origin)):
        response = ask(closed, method, "/v1/models", headers=headers)
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert ask(closed, "OPTIONS", "/v1/models", headers=preflight).status_code == 405
    # What needs no preflight is refused, and is not JSON to the server.
    plain = {"Content-Type": "text/plain"}
    assert ask(closed, "POST", "/v1/completions", headers=plain | origin, content=b'{"prompt": [1]}').status_code == 403
    assert ask(closed, "POST", "/v1/completions", headers=plain, content=b'{"prompt": [1]}').status_code == 415
    # Ollama's documentation has curl commands without a type; those of pages are refused all the same.
    curl = {"Content-Type": "application/x-www-form-urlencoded"}
    assert ask(closed, "POST", "/api/show", headers=curl, content=b'{"model": "another"}').status_code == 404
    assert ask(closed, "POST", "/api/show", headers=curl | origin, content=b'{"model": "another"}').status_code == 403
    named = app_of(allowed_origins=["https://good.example"])
    assert "access-control-allow-origin" not in ask(named, "GET", "/v1/models", headers=origin).headers
    answer = ask(named, "GET", "/v1/models", headers={"Origin": "https://good.example"})
    assert answer.headers["access-control-allow-origin"] == "https://good.example"
    every = ask(app_of(allowed_origins=["*"]), "GET", "/v1/models", headers=origin)
    assert every.headers["access-control-allow-origin"] == "*"


def state_changing() -> list[tuple[str, str]]:
    """Method and path of all routes that may change something."""
    return [
        (method, re.sub(r"{\w+(:\w+)?}", "x", route.path))
        for route in app_of().routes
        for method in sorted(route.methods - {"GET", "HEAD"})
    ]


@pytest.mark.parametrize("settings", [{}, {"api_key": ["one"]}, {"host": "0.0.0.0"}], ids=str)
def test_pages_of_other_origins_change_nothing(settings: dict[str, Any]) -> None:
    app, routes = app_of(**settings), state_changing()
    assert {("POST", "/v1/files"), ("DELETE", "/v1/files/x"), ("POST", "/sleep")} <= set(routes) and len(routes) > 40
    for method, path in routes:
        response = ask(app, method, path, headers={"Origin": "https://evil.example"} | bearer("Bearer one"))
        error = response.json()["error"]
        assert response.status_code == 403, path
        message = error if path.startswith("/api/") else error["message"]  # Ollama's errors are one text
        assert "--allowed-origins" in message and "https://evil.example" in message
        assert path.startswith(("/v1/messages", "/api/")) or error["code"] == "unknown_origin"


PAGES: list[tuple[dict[str, str], bool]] = [
    ({}, True),  # no browser
    ({"Origin": "http://localhost:8000"}, True),
    ({"Origin": "https://LOCALHOST:8000"}, True),  # behind a proxy that speaks TLS
    ({"Origin": "http://localhost:3000"}, False),
    ({"Origin": "http://localhost"}, False),
    ({"Origin": "http://127.0.0.1:8000"}, False),
    ({"Origin": "https://evil.example"}, False),
    ({"Origin": "null"}, False),
    ({"Origin": ""}, False),
    ({"Origin": "https://good.example"}, True),
    ({"Origin": "https://good.example.evil.example"}, False),
    ({"Sec-Fetch-Site": "same-origin"}, True),
    ({"Sec-Fetch-Site": "none"}, True),
    ({"Sec-Fetch-Site": "cross-site"}, False),
    ({"Sec-Fetch-Site": "same-site"}, False),
    ({"Sec-Fetch-Site": "", "Origin": "http://localhost:8000"}, False),
    ({"Sec-Fetch-Site": "same-origin", "Origin": "https://llm.example"}, True),  # behind a proxy with another name
    ({"Sec-Fetch-Site": "cross-site", "Origin": "https://good.example"}, True),
    ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost:8000"}, False),
    ({"Sec-Fetch-Mode": "cors"}, True),  # Node's fetch
]


@pytest.mark.parametrize(("headers", "may"), PAGES, ids=str)
def test_which_pages_may_ask(headers: dict[str, str], may: bool) -> None:
    app = app_of(allowed_origins=["https://good.example"])
    asked: dict[str, Any] = {"url": "http://localhost:8000", "headers": headers}
    upload = ask(app, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", b"{}")}, **asked)
    assert upload.status_code == (200 if may else 403)
    assert ask(app, "GET", "/v1/files", **asked).status_code == 200
    assert ask(app_of(allowed_origins=["*"]), "POST", "/ping", **asked).status_code == 200


HERE = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:80", "127.1.2.3", "[::1]:8000", "[::1]"]
ELSEWHERE = ["evil.example", "evil.example:8000", "localhost.evil.example", "192.168.1.5", "[::2]", "[", "x:y:z", ""]


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1"])
def test_on_loopback_the_host_must_be_loopback(bound: str) -> None:
    app = app_of(host=bound)
    for host in HERE:
        assert ask(app, "GET", "/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ELSEWHERE:
        for path in ("/v1/models", "/health", "/metrics"):
            response = ask(app, "GET", path, headers={"Host": host})
            assert response.status_code == 403, host
            assert response.json()["error"]["code"] == "unknown_host"
            assert "--allowed-hosts" in response.json()["error"]["message"]


def test_hosts_that_are_allowed_too() -> None:
    app = app_of(allowed_hosts=["LLM.example"])
    assert ask(app, "GET", "/v1/models", headers={"Host": "llm.example:8000"}).status_code == 200
    assert ask(app, "GET", "/v1/models", headers={"Host": "localhost"}).status_code == 200
    assert ask(app, "GET", "/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert ask(app_of(allowed_hosts=["*"]), "GET", "/health", headers={"Host": "any.example"}).status_code == 200


def test_elsewhere_hosts_are_checked_only_if_some_are_named() -> None:
    assert ask(app_of(host="0.0.0.0"), "GET", "/health", headers={"Host": "any.example"}).status_code == 200
    assert ask(app_of(uds="/tmp/x.sock"), "GET", "/health", headers={"Host": "any.example"}).status_code == 200
    named = app_of(host="0.0.0.0", allowed_hosts=["llm.example"])
    assert ask(named, "GET", "/health", headers={"Host": "any.example"}).status_code == 403


def test_a_request_without_a_host_is_http_1_0() -> None:
    sent: list[dict[str, Any]] = []
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "query_string": b"", "client": None}

    async def main() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        await app_of()({**scope, "root_path": "", "http_version": "1.0"}, receive, send)

    asyncio.run(main())
    assert sent[0]["status"] == 200


def test_models_show_no_path_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "secret" / "tiny-llama"
    folder.mkdir(parents=True)
    app = create_app(Idle(str(folder), "tiny-llama"), ServerConfig())  # type: ignore[arg-type]
    for path in ("/v1/models", "/v1/models/tiny-llama", "/", "/metrics"):
        response = ask(app, "GET", path)
        assert response.status_code == 200 and "secret" not in response.text
    assert card_of(app.state.models.entries[0], "tiny-llama")["root"] == "tiny-llama"
    wrong = ask(app, "POST", "/v1/completions", json={"model": "other", "prompt": [1]})
    assert wrong.status_code == 404 and "secret" not in wrong.text
    hub = create_app(Idle("Qwen/Qwen3-0.6B", "small"), ServerConfig())  # type: ignore[arg-type]
    assert ask(hub, "GET", "/v1/models").json()["data"][0]["root"] == "Qwen/Qwen3-0.6B"


OPERATED = [
    ("POST", path)
    for path in (
        *("/reset_prefix_cache", "/sleep", "/wake_up", "/pause", "/resume", "/start_profile", "/stop_profile"),
        *("/reset_mm_cache", "/reset_encoder_cache"),
    )
] + [("GET", "/is_sleeping"), ("GET", "/is_paused")]


def test_the_list_of_operators_routes_is_whole() -> None:
    routes = {(method, route.path) for route in ADMIN_ROUTES for method in (route.methods or set()) - {"HEAD"}}
    assert {*OPERATED, ("POST", "/abort_requests")} == routes


def refusal(app: Any, method: str, path: str, key: str | None) -> str | None:
    """Why a key may not do something; None: it may."""
    response = ask(app, method, path, headers={} if key is None else bearer(f"Bearer {key}"))
    return response.json()["error"]["code"] if response.status_code in (401, 403) else None


WHO: list[tuple[dict[str, Any], dict[str | None, str | None]]] = [
    ({}, {None: "key_needed", "wrong": "key_needed"}),
    ({"api_key": ["one", "two"]}, {None: "invalid_api_key", "wrong": "invalid_api_key", "one": None, "two": None}),
    (
        {"api_key": ["one"], "admin_key": ["boss", "chief"]},
        {None: "invalid_api_key", "wrong": "invalid_api_key", "one": "admin_key_needed", "boss": None, "chief": None},
    ),
    ({"admin_key": ["boss"]}, {None: "invalid_api_key", "wrong": "invalid_api_key", "boss": None}),
]


@pytest.mark.parametrize(("settings", "expected"), WHO, ids=str)
def test_who_may_operate_a_server(settings: dict[str, Any], expected: dict[str | None, str | None]) -> None:
    app = app_of(**settings)
    for method, path in OPERATED:
        assert {key: refusal(app, method, path, key) for key in expected} == expected, path


@pytest.mark.parametrize(("settings", "expected"), WHO, ids=str)
def test_who_may_ask(settings: dict[str, Any], expected: dict[str | None, str | None]) -> None:
    app, needed = app_of(**settings), bool(settings.get("api_key"))
    for key in expected:
        refused = needed and key in (None, "wrong")
        assert refusal(app, "GET", "/v1/models", key) == ("invalid_api_key" if refused else None)


@pytest.mark.parametrize("keys", [[""], ["good", ""], [" "], ["a "], "text"])
def test_operators_keys_that_cannot_be_sent_are_refused(keys: Any) -> None:
    with pytest.raises(ConfigError, match="admin_key must"):
        ServerConfig(admin_key=keys)


def test_a_key_has_one_role() -> None:
    with pytest.raises(ConfigError, match="name the same key"):
        ServerConfig(api_key=["one", "two"], admin_key=["two"])


class Busy(Idle):
    """An engine with requests of several owners, which notes what is aborted."""

    def __init__(self, ids: list[str]) -> None:
        super().__init__()
        self.request_ids = ids
        self.aborted: list[str] = []

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


@pytest.mark.parametrize(
    ("settings", "key", "body", "expected"),
    [
        ({}, "one", {}, {"first"}),
        ({}, "two", {}, {"second", "third"}),
        ({}, "one", {"request_ids": ["a", "b"]}, {"first"}),
        ({}, "one", {"request_ids": ["cmpl-b"]}, set()),
        ({}, "two", {"request_ids": ["cmpl-b"]}, {"second"}),
        ({"admin_key": ["boss"]}, "one", {}, {"first"}),
        ({"admin_key": ["boss"]}, "boss", {}, {"first", "second", "third"}),
        ({"admin_key": ["boss"]}, "boss", {"request_ids": ["a"]}, {"first", "third"}),
    ],
)
def test_requests_are_aborted_by_their_own_key(
    settings: dict[str, Any], key: str, body: dict[str, Any], expected: set[str]
) -> None:
    one, two = (hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two"))
    names = {
        "first": engine_id("cmpl-a", one),
        "second": engine_id("cmpl-b", two),
        "third": engine_id("chatcmpl-a", two),
    }
    engine = Busy(list(names.values()))
    app = create_app(engine, ServerConfig(api_key=["one", "two"], **settings))  # type: ignore[arg-type]
    answer = ask(app, "POST", "/abort_requests", json=body, headers=bearer(f"Bearer {key}"))
    assert answer.json() == {"status": "aborted", "aborted": len(expected)}
    assert set(engine.aborted) == {names[name] for name in expected}


def test_the_engines_ids_say_whose_requests_are(running: Any) -> None:
    """Owners of requests to every kind of route, by the ids that the engine was given."""
    seen: list[str] = []
    engine = running.engine
    app = create_app(engine, ServerConfig(api_key=["one", "two"]))
    owner = hashlib.sha256(b"two").hexdigest()
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    asked = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": [[40], [41]], "max_tokens": 2},
        "/v1/messages": chat,
        "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
        "/inference/v1/generate": {"token_ids": [40], "sampling_params": {"max_tokens": 2}},
        "/generative_scoring": {"query": [40], "items": [[41]], "label_token_ids": [42]},
    }

    async def main() -> list[int]:
        with pytest.MonkeyPatch.context() as patch:
            generate = engine.generate
            patch.setattr(engine, "generate", lambda *args, **more: (seen.append(args[2]), generate(*args, **more))[1])
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                headers = bearer("Bearer two")
                return [
                    (await client.post(path, json=body, headers=headers)).status_code for path, body in asked.items()
                ]

    assert running.call(main()) == [200] * len(asked)
    assert len(seen) == len(asked) + 1
    assert all(is_of(name, owner) and not is_of(name, "") for name in seen)


def test_salts_of_keys_need_keys() -> None:
    with pytest.raises(ConfigError, match="cache_salt_per_key"):
        ServerConfig(cache_salt_per_key=True)


@pytest.mark.parametrize(
    ("settings", "apart"),
    [
        ({}, False),
        ({"api_key": ["one"]}, False),
        ({"api_key": ["one", "one"]}, False),
        ({"api_key": ["one", "two"]}, True),
        ({"api_key": ["one"], "admin_key": ["boss"]}, True),
        ({"admin_key": ["boss"]}, True),
        ({"api_key": ["one"], "cache_salt_per_key": True}, True),
        ({"api_key": ["one", "two"], "cache_salt_per_key": False}, False),
    ],
    ids=str,
)
def test_when_caches_are_kept_apart(settings: dict[str, Any], apart: bool) -> None:
    assert ServerConfig(**settings).keys_apart is apart


@pytest.mark.parametrize("salted", [None, False])
def test_keys_share_no_cached_prefixes_unless_they_are_to(running: Any, salted: bool | None) -> None:
    settings = ServerConfig(api_key=["one", "two"], cache_salt_per_key=salted)
    app = create_app(running.engine, settings)
    prompt = [40 + (i * 7 + 3 * (salted is None)) % 60 for i in range(50)]  # three full pages

    async def cached(key: str, **more: Any) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = {"prompt": prompt, "max_tokens": 1, **more}
            response = await client.post("/v1/completions", json=body, headers=bearer(f"Bearer {key}"))
            count: int = json.loads(response.text)["usage"]["prompt_tokens_details"]["cached_tokens"]
            return count

    async def main() -> list[int]:
        asked = [("one", {}), ("one", {}), ("two", {}), ("one", {"cache_salt": "x"}), ("one", {"cache_salt": "x"})]
        return [await cached(key, **more) for key, more in asked]

    counts = running.call(main())
    assert counts == [0, 48, 0 if salted is None else 48, 0, 48]


CHAT = {"messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog"}]}
TEXT = {"prompt": "The quick brown fox jumps over the lazy dog", "add_special_tokens": False}


@pytest.mark.parametrize(
    ("path", "body", "is_encoded"),
    [
        ("/v1/chat/completions", {**CHAT, "max_tokens": 1}, [True, False, True, True, False]),
        ("/v1/completions", {**TEXT, "max_tokens": 1}, [True, False, True, True, False]),
        ("/tokenize", TEXT, [True] * 5),
    ],
)
def test_parts_that_are_tokenized_for_one_key_are_not_found_for_another(
    running: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], is_encoded: list[bool]
) -> None:
    app = create_app(running.engine, ServerConfig(api_key=["one", "two"]))
    backend, encoded = running.engine.tokenizer.backend, list[str]()
    encode = backend.encode

    def noted(text: str, **options: Any) -> Any:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr("llmjax.tokenizer.tokenizer.LONG_TEXT", 1)
    monkeypatch.setattr(backend, "encode", noted)

    async def main() -> list[bool]:
        found = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for key, salt in (("one", ""), ("one", ""), ("two", ""), ("one", "x"), ("one", "x")):
                del encoded[:]
                more = {"cache_salt": salt} if salt and "max_tokens" in body else {}
                answer = await client.post(path, json={**body, **more}, headers=bearer(f"Bearer {key}"))
                assert answer.status_code == 200, answer.text
                found.append(any("brown fox" in text for text in encoded))
        return found

    assert running.call(main()) == is_encoded
