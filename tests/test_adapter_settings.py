"""Settings that name adapters: vLLM's forms and llama-server's."""

from __future__ import annotations

import pytest

from llmjax.adapter_settings import AdapterModule, FixedAdapter, fixed_of, modules_of
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError

pytestmark = pytest.mark.smoke


def test_modules_in_both_forms() -> None:
    text = '{"name": "sql", "path": "/a/sql", "base_model_name": "org/base", "is_3d_lora_weight": false}'
    assert modules_of(["chat=/a/b=c", text]) == (
        AdapterModule(name="chat", path="/a/b=c"),
        AdapterModule(name="sql", path="/a/sql", base="org/base"),
    )


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (["chat"], "lora_modules must be name=path"),
        (["=path"], "lora_modules must be name=path"),
        (["chat="], "lora_modules must be name=path"),
        (["{name}"], "is not JSON"),
        (['{"name": "a"}'], "path must be a string that is not empty, not None"),
        (['{"name": 3, "path": "b"}'], "name must be a string"),
        (['{"name": "a", "path": "b", "base_model_name": ""}'], "base_model_name must be a string"),
        (['{"name": "a", "path": "b", "rank": 3}'], "unknown key 'rank'"),
        (["a=b", "a=c"], "lora_modules names 'a' twice"),
    ],
)
def test_wrong_modules(items: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(model="m", lora_modules=items)


def test_fixed_adapters_and_their_factors() -> None:
    found = fixed_of(["a.gguf", "b"], ["C:/x/c.gguf:0.5", "d:-1"], applied=True)
    assert found == (
        FixedAdapter(path="a.gguf", scale=1.0),
        FixedAdapter(path="b", scale=1.0),
        FixedAdapter(path="C:/x/c.gguf", scale=0.5),
        FixedAdapter(path="d", scale=-1.0),
    )
    assert {one.scale for one in fixed_of(["a"], ["b:2"], applied=False)} == {0.0}


@pytest.mark.parametrize("item", ["a", "a:", ":1", "a:much", "a:nan", "a:inf"])
def test_wrong_factors(item: str) -> None:
    with pytest.raises(ConfigError, match="lora_scaled must be path:factor"):
        EngineConfig(model="m", lora_scaled=[item])


def test_adapters_that_are_named_turn_the_setting_on() -> None:
    assert EngineConfig(model="m").adapter_slots == 0
    assert EngineConfig(model="m", enable_lora=True, max_loras=3).adapter_slots == 3
    assert EngineConfig(model="m", lora_modules=["a=b"]).adapter_slots == 1
    assert EngineConfig(model="m", lora=["a"]).enable_lora
    assert EngineConfig(model="m", lora_scaled=["a:2"], max_loras=2).adapter_slots == 2


def test_host_memory_has_room_for_what_the_device_has_room_for() -> None:
    assert EngineConfig(model="m", enable_lora=True).most_cpu_loras == 8
    assert EngineConfig(model="m", enable_lora=True, max_loras=6).most_cpu_loras == 12
    assert EngineConfig(model="m", enable_lora=True, max_loras=2, max_cpu_loras=3).most_cpu_loras == 3
    assert EngineConfig(model="m", lora=["a", "b", "c"], max_loras=4, max_cpu_loras=4).most_cpu_loras == 12
    with pytest.raises(ConfigError, match="max_cpu_loras 1 is less than max_loras, which is 2"):
        EngineConfig(model="m", enable_lora=True, max_loras=2, max_cpu_loras=1)
