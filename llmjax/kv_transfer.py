"""Prompts computed by one server and continued by another: the setting ``kv_transfer_config``, and what requests say
about it (``kv_transfer_params``), both in vLLM's form."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from llmjax.errors import ConfigError, InvalidRequest

SETTING, FIELD = "kv_transfer_config", "kv_transfer_params"
ROLES = ("kv_both", "kv_producer", "kv_consumer")
CONNECTORS = ("NixlConnector", "TCPConnector")  # there is one way, over TCP, which has vLLM's contract with routers
PORTS = range(1, 65536)
WANTS = ("do_remote_decode", "do_remote_prefill")  # one of which every request of this form has
FOREIGN = {  # keys by which other connectors' routers speak
    "transfer_id": "MooncakeConnector",
    "remote_bootstrap_addr": "MooncakeConnector",
    "ret_first_tok": "LMCacheConnector",
    "disagg_spec": "LMCacheConnector",
}


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """How KV pages go from server to server.

    Args:
        kv_connector: what carries them; pages go over TCP.
        kv_role: whether this server computes prompts for others, continues those of others, or both.
        kv_ip: address at which it gives pages away, and where others reach it.
        kv_port: the port there.
        kv_peers: ``host:port`` of the servers that it takes pages from; of others it takes none, whatever requests say.
        kv_buffer_size: bytes of pages that wait for others to take them, and as many that come from others.
        engine_id: what others call it.
    """

    kv_connector: str
    kv_role: str
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_peers: Sequence[str] = ()
    kv_buffer_size: float = 1e9
    engine_id: str = ""

    @property
    def gives(self) -> bool:
        """Others may have its pages."""
        return self.kv_role != "kv_consumer"

    @property
    def takes(self) -> bool:
        """It may have those of others."""
        return self.kv_role != "kv_producer"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> KVTransferConfig:
        """From a mapping in vLLM's form.

        Raises:
            ConfigError: a key is not known, or its value is not one that it may have.
        """
        kinds = {field.name: field.default for field in fields(cls)}
        for key in values:
            if key not in kinds:
                close = difflib.get_close_matches(str(key), kinds, n=1, cutoff=0.5)
                raise ConfigError(
                    f"{SETTING}: unknown key {key!r}; "
                    + (f"did you mean {close[0]}?" if close else f"it has {', '.join(kinds)}")
                )
        for key, choices in (("kv_connector", CONNECTORS), ("kv_role", ROLES)):
            if values.get(key) not in choices:
                raise ConfigError(f"{SETTING}: {key} must be one of {', '.join(choices)}, not {values.get(key)!r}")
        given = {key: value for key, value in values.items() if value is not None}
        for key in ("kv_ip", "engine_id"):
            if not isinstance(given.get(key, ""), str):
                raise ConfigError(f"{SETTING}: {key} must be a string, not {given[key]!r}")
        port, size = given.get("kv_port", 1), given.get("kv_buffer_size", 1)
        if type(port) is not int or port not in PORTS:
            raise ConfigError(f"{SETTING}: kv_port must be a port, not {port!r}")
        if type(size) not in (int, float) or not 1 <= size < 2**60:
            raise ConfigError(f"{SETTING}: kv_buffer_size must be a number of bytes, not {size!r}")
        config = cls(**given)
        config._check_peers()
        return config

    def _check_peers(self) -> None:
        if not isinstance(self.kv_peers, list | tuple):
            raise ConfigError(f"{SETTING}: kv_peers must be a list of servers, each host:port, not {self.kv_peers!r}")
        for peer in self.kv_peers:
            try:
                address_of(peer)
            except ValueError:
                raise ConfigError(f"{SETTING}: kv_peers must hold host:port, not {peer!r}") from None
        if self.takes and not self.kv_peers:
            raise ConfigError(
                f'{SETTING}: kv_role {self.kv_role} takes pages from other servers: name them, "kv_peers": '
                '["10.0.0.5:14579"] (or say kv_role kv_producer, which takes none)'
            )

    def peer(self, host: str, port: int) -> str | None:
        """The one of ``kv_peers`` that has an address, if any has."""
        return next((peer for peer in self.kv_peers if address_of(peer) == (host.lower(), port)), None)

    def answer(self, *, name: str, num_pages: int) -> dict[str, Any]:
        """``kv_transfer_params`` of the answer to a request whose prompt was computed for another server, which is to
        be asked with them.

        Args:
            name: name of the pages, as in the request.
            num_pages: how many full pages the prompt has.
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id or f"{self.kv_ip}:{self.kv_port}",
            "remote_request_id": name,
            "remote_block_ids": list(range(num_pages)),
            "remote_host": self.kv_ip,
            "remote_port": self.kv_port,
        }


def address_of(peer: str) -> tuple[str, int]:
    """Host, in lower case, and port of ``host:port`` or ``[address]:port``.

    Raises:
        ValueError: the text is not of that form.
    """
    split = urlsplit(f"//{peer}") if isinstance(peer, str) else urlsplit("")
    host, port = split.hostname, split.port
    if split.netloc != peer or "@" in peer or not host or port is None or port not in PORTS:
        raise ValueError(peer)
    return host, port


@dataclass(frozen=True, kw_only=True)
class KVTransfer:
    """What becomes of a request's pages.

    Args:
        give: name under which others may have those of the prompt.
        take: name under which another server has them.
        peer: the server to read from, spelled as in ``kv_peers``; pages it does not have are computed here.
    """

    give: str | None = None
    take: str | None = None
    peer: str = ""

    @classmethod
    def of(cls, values: Any, config: KVTransferConfig | None, *, name: str) -> KVTransfer | None:
        """From ``kv_transfer_params``; None: nothing becomes of them.

        Args:
            config: this server's configuration.
            name: under which the prompt's pages are given, if they are.

        Raises:
            InvalidRequest: they are not of that form, or this server does not do what they say.
        """
        if values is None:
            return None
        if not isinstance(values, Mapping):
            raise InvalidRequest(f"{FIELD} must be an object", field=FIELD)
        known = f"this server knows that of NixlConnector, which has {' or '.join(WANTS)}"
        for key, connector in FOREIGN.items():
            if key in values:
                raise InvalidRequest(f"{FIELD}: {key} is of the form of {connector}, and {known}", field=FIELD)
        if values and not any(key in values for key in WANTS):
            keys = ", ".join(sorted(str(key)[:40] for key in values)[:8])
            raise InvalidRequest(f"{FIELD} has {keys}, a form that is not known: {known}", field=FIELD)
        gives, takes = values.get("do_remote_decode") or False, values.get("do_remote_prefill") or False
        if type(gives) is not bool or type(takes) is not bool or (gives and takes):
            raise InvalidRequest(f"{FIELD}: do_remote_decode and do_remote_prefill: one may be true", field=FIELD)
        if not gives and not takes:
            return None
        if config is None or (gives and not config.gives) or (takes and not config.takes):
            role = "kv_producer" if gives else "kv_consumer"
            needed = f"a server started with --kv-transfer-config and its kv_role {role} or kv_both"
            raise InvalidRequest(f"{FIELD} needs {needed}", field=FIELD)
        if gives:
            return cls(give=name)
        host, port, their = (values.get(f"remote_{key}") for key in ("host", "port", "request_id"))
        if not isinstance(host, str) or not host or len(host) > 255:
            raise InvalidRequest(f"{FIELD}: remote_host must be the address of a server", field=FIELD)
        if type(port) is not int or port not in PORTS:
            raise InvalidRequest(f"{FIELD}: remote_port must be a port", field=FIELD)
        if not isinstance(their, str) or not 0 < len(their) <= 512:
            raise InvalidRequest(f"{FIELD}: remote_request_id must be that of the first server's answer", field=FIELD)
        if (peer := config.peer(host, port)) is None:
            raise InvalidRequest(
                f"{FIELD}: {host}:{port} is not one of the servers that this one takes pages from; its operator names "
                "them in --kv-transfer-config, kv_peers",
                field=FIELD,
            )
        return cls(take=their, peer=peer)
