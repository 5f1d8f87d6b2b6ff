"""Access control: host names that requests may be addressed to, web pages that may send them, and API keys."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llmjax.config import ServerConfig
from llmjax.serve.context import ADMIN, KEY, KEY_SALT, path_of
from llmjax.serve.errors import ApiError
from llmjax.serve.listen import is_loopback_address

# Answered without a key: the probes of load balancers always, what scrapers and people look at unless it is guarded.
PROBE_PATHS = frozenset({"/health", "/ping"})
STATUS_PATHS = frozenset({"/", "/metrics", "/version"})
PAGE_PATHS = ("/", "/web/")  # the chat page and the folder of its files, which say nothing of the model


def open_paths(config: ServerConfig) -> frozenset[str]:
    """Paths that need no key; one that ends in a slash, other than the first, stands for what is below it."""
    status = frozenset() if config.guard_metrics else STATUS_PATHS
    return PROBE_PATHS | status | frozenset(PAGE_PATHS if config.web else ())


class HostCheck:
    """Refuses requests whose ``Host`` is neither this machine's loopback nor one of ``allowed``.

    A server on loopback trusts everyone who can reach it. A web page of ``evil.example`` can, once its name resolves
    to 127.0.0.1 (DNS rebinding), and is of the same origin then; but its requests still say ``Host: evil.example``.

    Args:
        allowed: further names, in lower case; ``*``: any.
    """

    def __init__(self, app: ASGIApp, *, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # None came with HTTP/1.0, which no browser speaks.
            for host in Headers(scope=scope).getlist("host"):
                if not self._knows(host):
                    raise _unknown_host(host)
        await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        if "*" in self._allowed:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return name == "localhost" or name in self._allowed or is_loopback_address(name)


def _unknown_host(host: str) -> ApiError:
    return ApiError(
        f"requests addressed to the host {host[:100]!r} are refused; the server's --allowed-hosts names further hosts",
        status=403,
        code="unknown_host",
    )


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # change nothing, and other origins do not see their answers
OWN_SITES = frozenset({"same-origin", "none"})  # of Sec-Fetch-Site; none: a person has typed the address


class OriginCheck:
    """Refuses what pages of other origins would have a browser send that might change something here.

    A server on loopback trusts everyone who can reach it: also any page in a browser on its machine. Forms and uploads
    need no preflight. The browser says where they come from, in ``Sec-Fetch-Site`` or ``Origin``; other clients send
    neither.

    Args:
        allowed: origins whose pages may use the server; ``*``: any.
    """

    def __init__(self, app: ASGIApp, *, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS and not self._may_ask(Headers(scope=scope)):
            raise _unknown_origin(Headers(scope=scope).get("origin"))
        await self._app(scope, receive, send)

    def _may_ask(self, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        if "*" in self._allowed or (origins and self._allowed.issuperset(origins)):
            return True
        if sites := headers.getlist("sec-fetch-site"):
            return OWN_SITES.issuperset(sites)
        # An older browser. A proxy in front may speak another scheme, so hosts and ports alone are compared.
        host = headers.get("host", "").lower()
        return all(host and origin.lower().partition("://")[2] == host for origin in origins)


def _unknown_origin(origin: str | None) -> ApiError:
    whose = "another site" if origin is None else f"the origin {origin[:100]!r}"
    return ApiError(
        f"requests from pages of {whose} are refused; --allowed-origins names origins whose pages may use it",
        status=403,
        code="unknown_origin",
    )


class ApiKeys:
    """Asks for a bearer token, or an ``X-Api-Key``, that is one of the keys, wherever it is not told otherwise.

    Args:
        keys: keys of clients; empty: clients need none.
        admin_keys: keys of operators, who may do what clients may, and what `check_operator` guards.
        open_paths: paths that need no key; one that ends in a slash stands for the files in that folder too.
        salted: note a salt for each key, with which requests of other keys do not share cached prefixes.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        admin_keys: Sequence[str],
        open_paths: frozenset[str],
        salted: bool,
    ) -> None:
        self._app = app
        self._needed = bool(keys)
        self._digests = {_digest(key.encode()): False for key in keys} | {
            _digest(key.encode()): True for key in admin_keys
        }
        self._open_paths = open_paths
        self._salted = salted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A preflight brings no headers of its own; a wrong one ends in a 405.
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            key = self._key(scope)
            if key is None and self._guards(scope):
                raise _wrong_key()
            if key is not None:
                state = scope["state"]
                state[KEY] = state["record"].owner = key.hex()
                state[ADMIN] = self._digests[key]
                if self._salted:
                    state[KEY_SALT] = key.hex()
        await self._app(scope, receive, send)

    def _guards(self, scope: Scope) -> bool:
        path = path_of(scope)
        folder = path[: path.rfind("/") + 1]
        return self._needed and path not in self._open_paths and (folder == "/" or folder not in self._open_paths)

    def _key(self, scope: Scope) -> bytes | None:
        """Digest of the key that the request brings, or None if it brings none that counts."""
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":  # Anthropic's clients have a header of their own
            token = headers.get("x-api-key", "")
        given = _digest(token.strip().encode("latin-1"))  # the header's own bytes
        # Every key is compared, in constant time, so that timing says nothing.
        matches = [secrets.compare_digest(given, digest) for digest in self._digests]
        return given if any(matches) else None


def check_key(request: Request, config: ServerConfig) -> None:
    """Raises ApiError unless a request has a key: whoever may use the server may not do to others what it asks for."""
    if not config.api_key and not config.admin_key:
        raise ApiError("this needs a server with keys (--api-key, --admin-key)", status=403, code="key_needed")
    if KEY not in request.scope["state"]:
        raise _wrong_key()


def check_operator(request: Request, config: ServerConfig) -> None:
    """Raises ApiError unless a request has the key of an operator: where there are none, any key."""
    check_key(request, config)
    if config.admin_key and not is_admin(request):
        raise ApiError("this needs a key of an operator (--admin-key)", status=403, code="admin_key_needed")


def is_admin(request: Request) -> bool:
    """Whether a request has an ``--admin-key``."""
    admin: bool = request.scope["state"].get(ADMIN, False)
    return admin


def _wrong_key() -> ApiError:
    return ApiError(
        "missing or wrong API key; send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`",
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
