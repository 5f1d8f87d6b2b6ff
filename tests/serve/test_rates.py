"""What each key may ask for in a minute."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from llmjax.config import ServerConfig
from llmjax.errors import ConfigError
from llmjax.serve.access import ApiKeys
from llmjax.serve.app import create_app
from llmjax.serve.context import record_of
from llmjax.serve.errors import ApiError, handle_error
from llmjax.serve.middleware import RequestLog
from llmjax.serve.rates import Allowance, RateLimits
from tests.serve.test_access import Idle


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


async def answer(request: Request) -> PlainTextResponse:
    record = record_of(request)
    record.prompt_tokens, record.completion_tokens = 10, int(request.query_params.get("tokens", 0))
    return PlainTextResponse("done")


def app_of(clock: Clock, *, requests: int = 0, tokens: int = 0) -> Starlette:
    return Starlette(
        routes=[Route("/answer", answer, methods=["GET", "POST"]), Route("/other", answer, methods=["POST"])],
        middleware=[
            Middleware(RequestLog, enabled=False, id_header=False),
            Middleware(ApiKeys, keys=["one", "two"], admin_keys=[], open_paths=frozenset(), salted=False),
            Middleware(RateLimits, paths=frozenset({"/answer"}), requests=requests, tokens=tokens, clock=clock),
        ],
        exception_handlers={ApiError: handle_error},
    )


def ask(app: Any, path: str = "/answer", *, key: str = "one", method: str = "POST") -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, headers={"X-Api-Key": key})

    return asyncio.run(main())


def limits_in(answer: httpx.Response) -> dict[str, str]:
    begin = "x-ratelimit-"
    return {name.removeprefix(begin): value for name, value in answer.headers.items() if name.startswith(begin)}


def test_requests_of_a_key() -> None:
    clock = Clock()
    app = app_of(clock, requests=3)
    assert limits_in(ask(app)) == {"limit-requests": "3", "remaining-requests": "2", "reset-requests": "20.000s"}
    assert [ask(app).status_code for _ in range(3)] == [200, 200, 429]
    refused = ask(app)
    assert refused.headers["retry-after"] == "20" and limits_in(refused)["remaining-requests"] == "0"
    assert refused.json()["error"] == {
        "message": "this key may take 3 requests a minute; try again in 20 s",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert ask(app, key="two").status_code == 200, "other keys have their own"
    assert ask(app, key="three").status_code == 401
    assert ask(app, method="GET").status_code == ask(app, "/other").status_code == 200, "they ask for no answer"
    clock.now += 19.9
    assert ask(app).status_code == 429
    clock.now += 0.2
    assert [ask(app).status_code for _ in range(2)] == [200, 429]
    clock.now += 1000
    assert [ask(app).status_code for _ in range(4)] == [200, 200, 200, 429], "no more than a minute's are saved up"


def test_tokens_of_a_key() -> None:
    clock = Clock()
    app = app_of(clock, tokens=60)
    assert ask(app, "/answer?tokens=20").status_code == 200
    # One more than is left, which is known only when it has been answered.
    told = ask(app, "/answer?tokens=80")
    assert told.status_code == 200 and limits_in(told)["remaining-tokens"] == "30"
    refused = ask(app)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "61"
    assert "60 tokens a minute" in refused.json()["error"]["message"]
    clock.now += 61
    assert ask(app).status_code == 200


def test_what_is_refused_costs_nothing() -> None:
    clock = Clock()
    app = app_of(clock, requests=1, tokens=60)
    assert [ask(app).status_code for _ in range(5)] == [200, 429, 429, 429, 429]
    clock.now += 60
    assert limits_in(ask(app)) == {
        "limit-requests": "1",
        "remaining-requests": "0",
        "reset-requests": "60.000s",
        "limit-tokens": "60",
        "remaining-tokens": "60",
        "reset-tokens": "0.000s",
    }


def test_an_allowance_fills_evenly() -> None:
    clock = Clock()
    allowance = Allowance(120, clock)
    allowance.take(150)
    assert (allowance.left, allowance.seconds_until(1)) == (-30, 15.5)
    for _ in range(10):
        clock.now += 1.0
    assert allowance.left == pytest.approx(-10)


def test_a_server_counts_what_asks_for_answers() -> None:
    app = create_app(Idle(), ServerConfig(max_requests_per_minute=2))  # type: ignore[arg-type]
    paths = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"]
    # None of them has a body at all.
    assert [ask(app, path).status_code for path in paths] == [415, 415, 429, 415]
    assert limits_in(ask(create_app(Idle(), ServerConfig()), paths[0])) == {}  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_tokens_per_minute must be at least 0, not -1"):
        ServerConfig(max_tokens_per_minute=-1)
