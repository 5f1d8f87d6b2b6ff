"""The file of ``--mcp-config``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmjax.errors import ConfigError
from llmjax.serve.mcp.config import ToolServerConfig, read_config


def written(folder: Path, whole: Any) -> Path:
    path = folder / "mcp.json"
    path.write_text(whole if isinstance(whole, str) else json.dumps(whole))
    return path


def test_both_kinds_are_read(tmp_path: Path) -> None:
    servers = {
        "files": {"command": "files", "args": ["-x"], "env": {"A": "b"}, "cwd": "/", "allowedTools": ["read"]},
        "web": {"type": "streamable-http", "url": "http://x/mcp", "headers": {"K": "v"}, "allowedTools": ["a", "b"]},
    }
    assert read_config(written(tmp_path, {"mcpServers": servers})) == (
        ToolServerConfig(name="files", command="files", args=("-x",), env={"A": "b"}, cwd="/", allowed_tools=("read",)),
        ToolServerConfig(name="web", url="http://x/mcp", headers={"K": "v"}, allowed_tools=("a", "b")),
    )


GOOD = {"command": "c", "allowedTools": ["t"]}


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        ("{", "is not JSON"),
        ([], "mcpServers"),
        ({"mcpServers": {}, "inputs": []}, "'inputs' is not known"),
        ({"mcpServers": {"a b": GOOD}}, "a name has"),
        ({"mcpServers": {"a": {"allowedTools": ["t"]}}}, "either `command` or `url`"),
        ({"mcpServers": {"a": {**GOOD, "url": "x"}}}, "either `command` or `url`"),
        ({"mcpServers": {"a": {**GOOD, "disabled": True}}}, "a.disabled"),
        ({"mcpServers": {"a": {**GOOD, "type": "sse"}}}, "a.type"),
        ({"mcpServers": {"a": {**GOOD, "args": "x"}}}, "a.args"),
        ({"mcpServers": {"a": {**GOOD, "env": {"N": 1}}}}, "a.env"),
        ({"mcpServers": {"a": {"command": "c"}}}, "allowedTools"),
        ({"mcpServers": {"a": {**GOOD, "allowedTools": "*"}}}, "allowedTools"),
        ({"mcpServers": {f"s{i}": GOOD for i in range(65)}}, "more than 64"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, whole: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(written(tmp_path, whole))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json"):
        read_config(tmp_path / "no.json")
