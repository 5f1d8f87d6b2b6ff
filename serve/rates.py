"""How much each API key may ask for: requests and tokens a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmjax.serve.context import KEY, RequestRecord, is_post
from llmjax.serve.errors import ApiError

MINUTE = 60.0
UNITS = ("Requests", "Tokens")
HEADERS = tuple(f"X-RateLimit-{what}-{unit}" for unit in UNITS for what in ("Limit", "Remaining", "Reset"))


class Allowance:
    """A token bucket, as traffic shaping has it (Tanenbaum, Computer Networks): it is full at first, holds what is for
    one minute, and fills evenly. More may be taken than there is; then nothing is left until that has come in.

    Args:
        a_minute: above 0.
        clock: seconds.
    """

    def __init__(self, a_minute: int, clock: Callable[[], float]) -> None:
        self.a_minute = a_minute
        self._clock = clock
        self._left = float(a_minute)
        self._at = clock()

    @property
    def left(self) -> float:
        """Below 0 where too much has been taken."""
        now = self._clock()
        self._left = min(float(self.a_minute), self._left + (now - self._at) * self.a_minute / MINUTE)
        self._at = now
        return self._left

    def take(self, amount: int) -> None:
        """Takes some, whether it is there or not."""
        self._left = self.left - amount

    def seconds_until(self, amount: float) -> float:
        """Until there is so much."""
        return max(0.0, (amount - self.left) * MINUTE / self.a_minute)


@dataclass(frozen=True)
class _Allowances:
    """What one key may still ask for; None: any amount."""

    requests: Allowance | None
    tokens: Allowance | None

    def named(self) -> Iterator[tuple[str, Allowance]]:
        """The allowances that are limited, with their names."""
        if self.requests is not None:
            yield "requests", self.requests
        if self.tokens is not None:
            yield "tokens", self.tokens


class RateLimits:
    """Answers 429 to a key that has asked for too much, and says in OpenAI's headers how much is left.

    What a request will take in tokens is known when it has been answered, so one is let in while any are left, and what
    it took beyond that is missing afterwards.

    Args:
        paths: paths to which POST requests are counted.
        requests: how many a key may send in a minute; 0: any number.
        tokens: how many tokens prompts and answers of a key may have in a minute; 0: any number.
        clock: gives the time in seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: frozenset[str],
        requests: int,
        tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._paths = paths
        self._requests = requests
        self._tokens = tokens
        self._clock = clock
        self._of_key: dict[str, _Allowances] = {}  # as many as there are keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_post(scope, self._paths):
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        allowances = self._allowances(state.get(KEY, ""))
        for name, allowance in allowances.named():
            if (seconds := allowance.seconds_until(1)) > 0:
                raise _too_much(name, allowance, seconds, allowances)
        if allowances.requests is not None:
            allowances.requests.take(1)

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_headers(allowances))
            await send(message)

        try:
            await self._app(scope, receive, telling)
        finally:
            record: RequestRecord = state["record"]
            if allowances.tokens is not None:
                allowances.tokens.take((record.prompt_tokens or 0) + (record.completion_tokens or 0))

    def _allowances(self, key: str) -> _Allowances:
        if key not in self._of_key:
            self._of_key[key] = _Allowances(
                requests=Allowance(self._requests, self._clock) if self._requests else None,
                tokens=Allowance(self._tokens, self._clock) if self._tokens else None,
            )
        return self._of_key[key]


def _too_much(name: str, allowance: Allowance, seconds: float, allowances: _Allowances) -> ApiError:
    return ApiError(
        f"this key may take {allowance.a_minute} {name} a minute; try again in {math.ceil(seconds)} s",
        status=429,
        code="rate_limit_exceeded",
        headers={"Retry-After": str(math.ceil(seconds)), **_headers(allowances)},
    )


def _headers(allowances: _Allowances) -> dict[str, str]:
    headers = {}
    for name, allowance in allowances.named():
        unit = name.capitalize()
        headers[f"X-RateLimit-Limit-{unit}"] = str(allowance.a_minute)
        headers[f"X-RateLimit-Remaining-{unit}"] = str(max(0, int(allowance.left)))
        headers[f"X-RateLimit-Reset-{unit}"] = f"{allowance.seconds_until(allowance.a_minute):.3f}s"
    return headers
