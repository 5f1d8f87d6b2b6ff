"""What clients may see of the settings: nothing that nobody has listed."""

from __future__ import annotations

import asyncio
import dataclasses
import typing
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.engine.info import EngineInfo
from llmjax.kv_transfer import KVTransferConfig
from llmjax.serve.routes.ops import server_info
from llmjax.serve.shown import SHOWN, shown
from llmjax.speculative import SpeculativeConfig

# Listed fields whose text is a name; what else is listed is a number, a switch or one of some choices.
NAMES = {
    EngineConfig: {"revision", "served_model_name", "quantization", "device", "device_ids", "cpu_list"},
    ServerConfig: {"response_role", "tool_call_parser", "reasoning_parser"},
}


def marked(cls: type) -> Any:
    """An object of a class of settings, each field of which holds a text that says which it is."""
    made = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(made, field.name, f"<{field.name}>")
    return made


@pytest.mark.parametrize("cls", SHOWN, ids=lambda cls: cls.__name__)
def test_only_what_is_listed_is_shown(cls: type) -> None:
    names = {field.name for field in dataclasses.fields(cls)}
    assert SHOWN[cls] <= names, "it lists what is not there"
    found = shown(marked(cls))
    assert found == {name: f"<{name}>" for name in found}
    assert found.keys() == SHOWN[cls]


@pytest.mark.parametrize("cls", SHOWN, ids=lambda cls: cls.__name__)
def test_a_new_field_is_hidden(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    later = dataclasses.make_dataclass(
        "Later", [("new_secret", str, dataclasses.field(kw_only=True))], bases=(cls,), frozen=True
    )
    monkeypatch.setitem(SHOWN, later, SHOWN[cls])  # type: ignore[arg-type]
    assert "new_secret" not in shown(marked(later))


@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig])
def test_no_setting_of_free_text_is_listed(cls: type) -> None:
    hints = typing.get_type_hints(cls)
    texts = {
        field.name
        for field in dataclasses.fields(cls)
        if not field.metadata["choices"] and not set(flat(hints[field.name])) <= {bool, int, float, type(None)}
    }
    assert {"master_secret", "hf_token", "kv_offloading_dir"} <= texts or cls is ServerConfig
    assert {"api_key", "otlp_traces_endpoint", "files_dir"} <= texts or cls is EngineConfig
    assert texts & SHOWN[cls] == NAMES[cls]


def flat(hint: Any) -> list[Any]:
    """The types that a hint is made of; those of a sequence's items in its place."""
    return [kind for part in typing.get_args(hint) for kind in flat(part)] or [hint]


SECRET = "hush"
PRIVATE_ENGINE: dict[str, Any] = {
    "model": f"/home/{SECRET}/model",
    "tokenizer": f"/home/{SECRET}/tokenizer",
    "hf_token": SECRET,
    "master_secret": SECRET,
    "master_addr": f"{SECRET}.internal",
    "chat_template": f"/home/{SECRET}.jinja",
    "kv_offloading_size": 1.0,
    "kv_offloading_dir": f"/home/{SECRET}/pages",
    "profile_dir": f"/home/{SECRET}/profiles",
    "speculative_config": {"model": f"/home/{SECRET}/draft", "num_speculative_tokens": 4},
    "kv_events_config": {"enable_kv_cache_events": True, "endpoint": f"tcp://{SECRET}:5557"},
    "hf_overrides": {"_name_or_path": f"/home/{SECRET}"},
}
PRIVATE_SERVER: dict[str, Any] = {
    "api_key": [SECRET],
    "otlp_traces_endpoint": f"http://user:{SECRET}@collector:4318",
    "files_dir": f"/home/{SECRET}/files",
    "allowed_hosts": [f"{SECRET}.internal"],
    "default_chat_template_kwargs": {"persona": SECRET},
}


def info_of(engine: EngineConfig, server: ServerConfig) -> httpx.Response:
    """The answer of ``/server_info``, around an engine that is asked for nothing."""
    fields = dict.fromkeys((field.name for field in dataclasses.fields(EngineInfo)), 1)
    info = EngineInfo(**{**fields, "model_path": f"/home/{SECRET}", "slow": f"/home/{SECRET}", "pooler": None})  # type: ignore[arg-type]
    served = SimpleNamespace(config=engine, info=info)
    model = SimpleNamespace(server=SimpleNamespace(engine=served, config=server, model_root="m"))
    state = SimpleNamespace(models=SimpleNamespace(find=lambda _: model))
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state), query_params={})
    response = asyncio.run(server_info(request))
    return httpx.Response(response.status_code, content=bytes(response.body))


def test_the_endpoint_gives_nothing_away() -> None:
    answer = info_of(EngineConfig(**PRIVATE_ENGINE), ServerConfig(**PRIVATE_SERVER))
    assert SECRET not in answer.text
    settings = answer.json()["settings"]
    assert (settings["page_size"], settings["log_level"]) == (32, "info")
    assert settings["speculative_config"]["num_speculative_tokens"] == 4
    assert "model" not in settings["speculative_config"] and "endpoint" not in settings["kv_events_config"]
    assert settings["kv_transfer_config"] is None


def test_nested_settings_have_lists_of_their_own() -> None:
    drafts = SpeculativeConfig(num_speculative_tokens=2, model="/home/draft")
    assert shown(drafts)["num_speculative_tokens"] == 2
    transfer = KVTransferConfig(kv_connector="TCPConnector", kv_role="kv_both", kv_ip="10.0.0.5")
    assert shown(transfer) == {"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_buffer_size": 1e9}
