"""Clients that people have: OpenAI's Node package and the Vercel AI SDK, if they are there.

``npm install --prefix tests/serve/clients`` brings them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llmjax.config import ServerConfig
from tests.serve.javascript import run_program
from tests.serve.scripted import scripted_engine
from tests.serve.test_tools import BODY, SCRIPTS, SPECIAL

PACKAGES = {"openai.mjs": "openai", "ai_sdk.mjs": "@ai-sdk/openai"}
# Whoever has tools and no result of one calls two; else there is nothing to do.
TEMPLATE = (
    "{# <tool_call> #}" + BODY + "{{ '[[two calls]]' if tools and messages[-1].role != 'tool' else '[[plain]]' }}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, start_server: Any, compile_cache_dir: str) -> Iterator[Any]:
    config = scripted_engine(
        tmp_path_factory.mktemp("models") / "scripted",
        SCRIPTS,
        special=SPECIAL,
        template=TEMPLATE,
        context=2048,
        compile_cache_dir=compile_cache_dir,
    )
    running, stop = start_server(config, ServerConfig(port=0))
    yield running
    stop()


@pytest.mark.parametrize("script", PACKAGES)
def test_a_program_in_javascript(server: Any, script: str) -> None:
    run_program(script, f"{server.url}/v1", package=PACKAGES[script])
    server.wait_idle()
    assert server.engine.kv_stats().used == 0
