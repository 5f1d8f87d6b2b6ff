"""The server that a benchmark starts for itself."""

from __future__ import annotations

import pytest

from llmjax.bench.own_server import changed_settings
from llmjax.cli import main
from llmjax.config import EngineConfig
from llmjax.settings import make_config


def test_settings_pass_through_yaml_unchanged() -> None:
    config = EngineConfig(model="m", max_num_seqs=4, kv_cache_memory_bytes=2**20, hf_overrides={"a": 1}, offline=True)
    changed = changed_settings(config)
    assert set(changed) == {"model", "max_num_seqs", "kv_cache_memory_bytes", "hf_overrides", "offline"}
    assert make_config(EngineConfig, changed, source="yaml") == config


def test_a_server_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--model", "/nowhere/model.gguf", "--num-prompts", "1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("llmjax: error: the server did not start: ")
    assert "/nowhere/model.gguf" in error
    assert error.count("\n") == 2 and "\n  hint: there is no folder /nowhere" in error
