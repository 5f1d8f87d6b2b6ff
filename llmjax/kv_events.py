"""Whom the engine tells of pages that its prefix cache gets and loses: the setting ``kv_events_config``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llmjax.errors import ConfigError

SETTING = "kv_events_config"
COUNTS = ("buffer_steps", "hwm", "max_queue_size")
ENDPOINT = re.compile(r"(tcp://[^\s]+:\d{1,5}|ipc://\S+|inproc://\S+)")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Events over ZeroMQ, as vLLM has them.

    Args:
        endpoint: where subscribers connect to; one with a host in place of ``*`` is connected to instead.
        replay_endpoint: where they ask for what they have missed.
        buffer_steps: messages that are kept for them.
        hwm: messages that wait for a slow subscriber; more are lost to it.
        max_queue_size: messages that wait to be sent; more are lost to all.
        topic: the topic of all messages.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> KVEventsConfig | None:
        """From a mapping in vLLM's form; None: it says that there are to be none.

        Raises:
            ConfigError: a key is not known, or its value is not one that it may have.
        """
        keys = ["enable_kv_cache_events", "publisher", *[field.name for field in fields(cls)]]
        for key in values:
            if key not in keys:
                close = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(keys)}"
                raise ConfigError(f"{SETTING}: unknown key {key!r}; {hint}")
        enabled = values.get("enable_kv_cache_events", False)
        if not isinstance(enabled, bool):
            raise ConfigError(f"{SETTING}: enable_kv_cache_events must be true or false, not {enabled!r}")
        publisher = values.get("publisher")
        if publisher not in (None, "zmq", "null"):
            raise ConfigError(f"{SETTING}: publisher must be zmq or null, not {publisher!r}")
        if publisher == "zmq" and not enabled:
            raise ConfigError(f"{SETTING}: publisher zmq needs enable_kv_cache_events")
        given = {key: value for key, value in values.items() if key in keys[2:] and value is not None}
        for key in COUNTS:
            value = given.get(key, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{SETTING}: {key} must be an integer of at least 1, not {value!r}")
        for key in ("endpoint", "replay_endpoint"):
            value = given.get(key, cls.endpoint)
            if not isinstance(value, str) or not ENDPOINT.fullmatch(value):
                raise ConfigError(f"{SETTING}: {key} must be like tcp://*:5557 or ipc:///path, not {value!r}")
        if not isinstance(given.get("topic", ""), str):
            raise ConfigError(f"{SETTING}: topic must be a string, not {given['topic']!r}")
        return cls(**given) if enabled and publisher != "null" else None
