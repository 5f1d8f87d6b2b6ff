"""Names of models to pull, and the folders that they may have."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.errors import InvalidRequest
from llmjax.pulled.names import parse_name

REGISTRY = "https://registry.ollama.ai"
ROOT = PurePosixPath("/pulled")


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", "hf.co/Qwen/Qwen3-0.6B-GGUF/Q8_0"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "hf.co/Qwen/Qwen3-0.6B/latest"),
        ("Qwen/Qwen3-0.6B", "hf.co/Qwen/Qwen3-0.6B/latest"),
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:latest", "hf.co/Qwen/Qwen3-0.6B-GGUF/latest"),
        ("llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
        ("llama3.2:1b-instruct-q4_K_M", "registry.ollama.ai/library/llama3.2/1b-instruct-q4_K_M"),
        ("ollama.com/someone/model:7b", "registry.ollama.ai/someone/model/7b"),
        ("registry.ollama.ai/library/llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
    ],
)
def test_a_name_says_its_host(text: str, folder: str) -> None:
    assert str(parse_name(text, registry=REGISTRY).folder) == folder


def test_a_registry_of_ones_own_may_have_a_port() -> None:
    found = parse_name("localhost:8080/team/model:tag", registry="http://localhost:8080/")
    assert (found.host, found.owner, found.model, found.tag) == ("localhost:8080", "team", "model", "tag")
    assert str(found.folder) == "localhost_8080/team/model/tag"
    assert parse_name("plain", registry="http://localhost:8080").source == "localhost:8080/library/plain"


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "a:", "a/b:", "/a", "a/", "a//b", "../a", "a/..", "hf.co/../a", "hf.co/a/..", "a/b/c/d", "a:../b"),
        *("a:..", "a/b:c/../..", ".hidden", "a/.hidden", "a b", "a/b\n", "a/b\x00", "a" * 129, "é", "hf.co//a", "a..b"),
        *("file:///etc/passwd", "a\\b", "C:\\x", "~/x", "a/b:*"),
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_name(text, registry=REGISTRY)
    assert caught.value.field == "model"


def test_other_hosts_are_not_asked() -> None:
    with pytest.raises(InvalidRequest, match=r"not from 'evil.example'; --ollama-registry names another registry"):
        parse_name("evil.example/a/b", registry=REGISTRY)


@given(st.text(alphabet="ab./:-_~\\ \n\0é%", max_size=12))
def test_no_folder_leaves_that_of_pulled_models(text: str) -> None:
    try:
        folder = parse_name(text, registry=REGISTRY).folder
    except InvalidRequest:
        return
    assert len(folder.parts) == 4 and not {"..", ".", "/"} & set(folder.parts)
    assert all(ord(char) > 32 for char in str(folder))
