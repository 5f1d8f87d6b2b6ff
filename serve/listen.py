"""The socket the server listens on, checked before anything expensive happens, and how to reach it."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import shlex
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmjax.config import ServerConfig
from llmjax.errors import ConfigError

if TYPE_CHECKING:
    from llmjax.serve.interfaces import Engine

ANY_ADDRESS = frozenset({"0.0.0.0", "::", ""})
SMALL = "hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0"  # a model to begin with


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet: until the model is loaded, clients are refused, not kept waiting.

    Raises:
        ConfigError: the port, address or path cannot be used.
    """
    return _bind_unix(Path(config.uds)) if config.uds else _bind_tcp(config.host, config.port)


def on_loopback(config: ServerConfig) -> bool:
    """Whether the server listens on an address that only this machine reaches by TCP."""
    if config.uds or config.host in ANY_ADDRESS:
        return False
    try:
        address = socket.getaddrinfo(config.host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return False  # binding to it says why
    return is_loopback_address(str(address))


def is_loopback_address(name: str) -> bool:
    """Whether ``name`` is an IP address that only this machine reaches."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error.strerror}") from None
    sock = socket.socket(family, kind, proto)
    try:
        # Lets a restarted server take its port back at once; a port that someone listens on stays busy.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            hint = "end what listens there, or choose another with --port (0: any that is free)"
            raise ConfigError(f"port {port} on {host} is in use", hint=hint) from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


def _bind_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise ConfigError(f"{path} exists and is not a socket")
            if sock.connect_ex(str(path)) == 0:
                raise ConfigError(f"another server listens on {path}")
            path.unlink()  # left behind by a server that is gone
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
    except ConfigError:
        sock.close()
        raise
    return sock


def check_tls(config: ServerConfig) -> None:
    """Raises ``ConfigError`` when the TLS key or certificate cannot be read."""
    for name in ("ssl_keyfile", "ssl_certfile"):
        path = getattr(config, name)
        if path and not os.access(path, os.R_OK):
            raise ConfigError(f"{name}: {path} cannot be read")


def base_url(config: ServerConfig, sock: socket.socket) -> str:
    """Where clients on this machine find the server; ``root_path`` is what a proxy adds in front of it."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds:
        return f"{scheme}://localhost"
    host = "localhost" if config.host in ANY_ADDRESS else config.host
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{sock.getsockname()[1]}"


def first_request(url: str, config: ServerConfig, engine: Engine) -> str:
    """A ``curl`` command line that works with this model."""
    body: dict[str, Any]
    if engine.tokenizer is None:
        path, body = "completions", {"prompt": [1, 2, 3]}
    elif engine.tokenizer.chat_template is None:
        path, body = "completions", {"prompt": "Once upon a time"}
    else:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    line = _curl(f"{url}/v1/{path}", config, body)
    return f'{line} -H "Authorization: Bearer $API_KEY"' if config.api_key else line


def first_pull(url: str, config: ServerConfig) -> str:
    """A ``curl`` command line that pulls a small model."""
    return f'{_curl(f"{url}/api/pull", config, {"model": SMALL})} -H "Authorization: Bearer $ADMIN_KEY"'


def _curl(url: str, config: ServerConfig, body: dict[str, Any]) -> str:
    words = ["curl", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    if config.uds:
        words[1:1] = ["--unix-socket", config.uds]
    return shlex.join(words)
