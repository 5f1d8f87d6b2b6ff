"""The chat page of a server without a model, into which one is pulled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ollama
import pytest

from llmjax.config import EngineConfig, ServerConfig
from tests.pulled.hosts import serving, tiny_gguf
from tests.serve.several import start_several
from tests.web.conftest import Visitor
from tests.web.page import expect

pytestmark = pytest.mark.slow

ADMIN = "the-admin-key"
NAME = "tiny:1b"


def test_a_model_that_is_pulled_answers_at_once(
    visitor_of: Callable[..., Visitor], tmp_path: Path, compile_cache_dir: str
) -> None:
    common = EngineConfig(
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=2**20,
        download_dir=str(tmp_path / "downloads"),
        compilation_cache_dir=compile_cache_dir,
    )
    with serving() as hosts:
        hosts.publish("library/tiny:1b", {"model": tiny_gguf(tmp_path / "tiny.gguf")})
        config = ServerConfig(port=0, admin_key=[ADMIN], ollama_registry=hosts.url)
        running, stop = start_several([], config, common=common)
        try:
            visitor = visitor_of(running.url)
            visitor.expected = ("404", "409")  # no model is there, or it is not loaded
            visitor.open()
            models = visitor.page.get_by_role("combobox", name="Model")
            expect(models).to_have_text("no model yet")
            expect(visitor.ask("w w")).to_contain_text("this server has no models yet: POST /api/pull")
            visitor.open("/#/engine")
            expect(visitor.page.get_by_role("heading", name="Engine")).to_be_visible()
            with ollama.Client(host=running.url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=None) as client:
                client.pull(NAME)
            visitor.open()
            models.focus()
            expect(models).to_have_text(NAME)
            assert visitor.bodies() and "model" not in visitor.bodies()[0]
            expect(visitor.ask("w w")).not_to_contain_text("no models")
            assert running.states() == {NAME: "loaded"}
        finally:
            stop()
