"""A small streaming client of OpenAI's HTTP API; the benchmark and the terminal chat talk to servers through it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any

import httpx

from llmjax.errors import LLMJaxError


class RequestFailed(LLMJaxError):
    """A server refused a request, cannot be reached, or broke off its answer."""


class OpenAIClient:
    """One server.

    Args:
        url: its address, with or without ``/v1``.
        api_key: sent as a bearer token; None: nothing is.
        headers: further headers of every request.
        timeout: seconds without a byte after which a request fails.
        insecure: take any certificate.

    Raises:
        RequestFailed: the URL is not that of a server.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        insecure: bool = False,
    ) -> None:
        self.url = _checked(url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        sent = dict(headers or {})
        if api_key is not None:
            sent["Authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=sent, limits=limits, timeout=timeout, verify=not insecure
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> httpx.Response:
        """The answer of a GET.

        Raises:
            RequestFailed: there is none, or its status is not a success.
        """
        return await self._send("GET", path)

    async def command(self, path: str) -> None:
        """A POST without a body, whose answer says nothing.

        Raises:
            RequestFailed: see ``get``.
        """
        await self._send("POST", path)

    async def post(self, path: str, payload: Mapping[str, Any], *, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON answer of a POST.

        Raises:
            RequestFailed: see ``get``.
        """
        response = await self._send("POST", path, json=payload, headers=headers)
        try:
            return response.json()
        except ValueError:
            raise RequestFailed(f"{self.url}{path}: the answer is not JSON") from None

    async def first_model(self) -> str:
        """The name of the first model that the server lists.

        Raises:
            RequestFailed: it lists none.
        """
        try:
            return str((await self.get("/v1/models")).json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise RequestFailed(f"{self.url}/v1/models lists no model") from None

    async def stream(
        self,
        path: str,
        payload: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        last: Collection[str] = (),
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of a POST, parsed, up to ``[DONE]`` or the last one.

        Args:
            last: types of events of which one is the last, where there is no ``[DONE]``.

        Raises:
            RequestFailed: the server refuses, sends an error event, or ends the stream before its end.
        """
        try:
            async with self._http.stream("POST", path, json=payload, headers=headers) as response:
                if response.is_error:
                    await response.aread()
                    raise RequestFailed(_explain(response))
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue  # a comment that keeps the connection open, or a blank line
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    event = json.loads(data)
                    if event.get("error") is not None:
                        raise RequestFailed(_message(event))
                    yield event
                    if event.get("type") in last:
                        return
        except httpx.HTTPError as error:
            raise RequestFailed(f"{self.url}{path}: {str(error) or type(error).__name__}") from None
        except ValueError as error:
            raise RequestFailed(f"{self.url}{path}: an event is not JSON ({error})") from None
        raise RequestFailed(f"{self.url}{path}: the stream ended early, without [DONE]")

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = await self._http.request(method, path, **options)
        except httpx.ConnectError as error:
            hint = "is a server running there? llmjax serve starts one; --url and --port say where to look"
            raise RequestFailed(f"{self.url} cannot be reached: {error}", hint=hint) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RequestFailed(f"{self.url}{path}: {str(error) or type(error).__name__}") from None
        if response.is_error:
            raise RequestFailed(_explain(response))
        return response


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise RequestFailed(f"{url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or not 0 <= (parsed.port or 0) <= 65535:
        raise RequestFailed(f"{url!r} is not a URL of a server, such as http://127.0.0.1:8000")
    return url


def _explain(response: httpx.Response) -> str:
    try:
        message = _message(response.json())
    except (ValueError, TypeError, AttributeError):
        message = " ".join(response.text.split())[:200]
    return f"{response.url}: {response.status_code} {response.reason_phrase}: {message}"


def _message(body: Mapping[str, Any]) -> str:
    """The message of an error body of OpenAI's form, or the body as it is."""
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)
