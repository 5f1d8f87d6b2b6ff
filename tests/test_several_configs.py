"""Settings of several models: what stands at the top, at a model, and on the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmjax.cli.serve import parse
from llmjax.config import EngineConfig
from llmjax.config_file import Configs, load_configs, name_of
from llmjax.errors import ConfigError
from llmjax.several.serving import ON_DEMAND, manners_of

pytestmark = pytest.mark.smoke


def read(tmp_path: Path, content: Any, *flags: str) -> Configs:
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return parse(["--config", str(file), *flags])


def test_a_models_own_settings_win_over_the_top_and_flags_over_all(tmp_path: Path) -> None:
    content = {
        "port": 8001,
        "max_model_len": "8k",
        "tool_call_parser": "hermes",
        "load": "demand",
        "models": {
            "chat": {"model": "org/chat", "pinned": True, "load": "start", "tool_call_parser": "mistral"},
            "embed": {"model": "org/embed", "max-model-len": 512, "keep_alive": "10m", "dtype": "float32"},
            "plain": "org/plain",
        },
    }
    configs = read(tmp_path, content)
    chat, embed, plain = configs.models
    assert [one.name for one in configs.models] == ["chat", "embed", "plain"]
    assert [one.engine.model for one in configs.models] == ["org/chat", "org/embed", "org/plain"]
    assert [one.engine.max_model_len for one in configs.models] == [8000, 512, 8000]
    assert [one.engine.served_names for one in configs.models] == [("chat",), ("embed",), ("plain",)]
    assert [one.server.tool_call_parser for one in configs.models] == ["mistral", "hermes", "hermes"]
    assert (embed.engine.dtype, chat.engine.dtype) == ("float32", "auto")
    assert {one.engine.engine_process for one in configs.models} == {"process"}
    assert configs.server.port == 8001 and configs.server.tool_call_parser == "hermes"
    assert (chat.settings.load, chat.settings.pinned) == ("start", True)
    assert (embed.settings.load, embed.settings.keep_alive) == ("demand", 600.0)
    assert manners_of(plain.settings).keep_alive == ON_DEMAND
    assert manners_of(chat.settings).keep_alive == math.inf
    given = read(tmp_path, content, "--max-model-len", "1024", "--keep-alive=-1", "--dtype", "bfloat16")
    assert {one.engine.max_model_len for one in given.models} == {1024}
    assert {one.engine.dtype for one in given.models} == {"bfloat16"}
    assert {one.settings.keep_alive for one in given.models} == {math.inf}


def test_a_list_names_models_by_what_they_are(tmp_path: Path) -> None:
    content = {"models": [{"model": "org/a"}, {"model": "org/b", "served_model_name": ["b", "bee"]}, "org/c"]}
    configs = read(tmp_path, content)
    assert [one.name for one in configs.models] == ["org/a", "b", "org/c"]
    assert configs.models[1].engine.served_names == ("b", "bee")


def test_models_of_the_command_line() -> None:
    configs = parse(["--model", "org/a", "--model", "org/b", "--load", "demand", "--max-num-seqs", "3"])
    assert [(one.name, one.engine.max_num_seqs, one.settings.load) for one in configs.models] == [
        ("org/a", 3, "demand"),
        ("org/b", 3, "demand"),
    ]
    assert parse(["--model", "org/a", "--model", "org/a"]).models is None
    assert parse(["org/a"]).models is None
    (only,) = parse(["org/a", "--load", "demand"]).models
    assert (only.name, only.settings.load) == ("org/a", "demand")


def test_models_that_are_pulled_need_none_beside_them(tmp_path: Path) -> None:
    configs = parse(["--load", "demand", "--max-num-seqs", "3", "--keep-alive", "1h", "--admin-key", "word"])
    assert configs.models == ()
    assert (configs.engine.max_num_seqs, configs.manners.keep_alive, configs.server.admin_key) == (3, 3600, ["word"])
    assert read(tmp_path, {"load": "demand", "max_num_seqs": 3}).models == ()
    (only,) = read(tmp_path, {"load": "demand", "gguf_file": "/nowhere/a.gguf"}).models or ()
    assert only.engine.model == "/nowhere/a.gguf"
    for own in ("served_model_name", "tokenizer", "mmproj"):
        with pytest.raises(ConfigError, match=f"{own} is a setting of one model, and none is named"):
            read(tmp_path, {"load": "demand", own: "x"})
    with pytest.raises(ConfigError, match="data_parallel_size 2 is not supported"):
        read(tmp_path, {"load": "demand", "data_parallel_size": 2})
    assert read(tmp_path, {"max_num_seqs": 3}).models is None  # the default model


def test_names_of_models_without_one(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    for model, name in (
        (str(tmp_path / "tiny"), "tiny"),
        ("/nowhere/Some-Q4.gguf", "Some-Q4"),
        ("pypi://pack==1/inside/Small.Q4_1.gguf#sha256=ab", "Small.Q4_1"),
        ("pypi://pack==1/inside/Small.Q4_1.gguf #sha256=ab", "Small.Q4_1"),
        ("org/name", "org/name"),
    ):
        assert name_of(EngineConfig(model=model)) == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"models": []}, "models must be a list of models"),
        ({"models": "org/a"}, "models must be a list of models"),
        ({"models": [3]}, "number 1 must be a mapping of settings"),
        ({"models": {"a": {"model": "m", "port": 3}}}, "a: port belongs to the whole server"),
        ({"models": {"a": {"model": "m", "max_modle_len": 3}}}, "did you mean max_model_len"),
        ({"models": {"a": {"model": "m"}}, "model": "n"}, "model is given beside models"),
        ({"models": ["m", "n"], "served_model_name": "x"}, "served_model_name is given beside models"),
        ({"models": ["m", "m"]}, "two of the models are called 'm'"),
        ({"models": {"a": {"model": "m", "load": "later"}}}, "load must be one of start, demand"),
        ({"models": {"a": {"model": "m", "keep_alive": "soon"}}}, "keep_alive must be a duration such as 300, 5m"),
        ({"models": {"a": {"model": "m", "data_parallel_size": 2}}}, "data_parallel_size 2 is not supported"),
        ({"models": {"a": {"model": "m", "pipeline_parallel_size": 2}}}, "several processes"),
        (
            {"models": [{"model": "m", "served_model_name": ["a", "*"]}, {"model": "n", "served_model_name": "*"}]},
            "only one of several",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, content)


def test_other_commands_take_one_model(tmp_path: Path) -> None:
    from llmjax.cli.generate import main

    file = tmp_path / "models.yaml"
    file.write_text("models: [a/b, c/d]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is for a server with several models, and this command takes one"):
        main(["--config", str(file), "Hello"])
    assert len(load_configs(str(file)).models) == 2
