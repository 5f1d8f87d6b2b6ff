"""LangChain's own tests of chat models and of embeddings, through ``langchain-openai``, if they are there.

``pip install 'llmjax[test-clients]'`` brings them, and plug-ins of pytest that they need.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmjax.config import EngineConfig, ServerConfig
from tests.serve.test_pooling import config as config_for_vectors

langchain_openai = pytest.importorskip("langchain_openai", reason="pip install 'llmjax[test-clients]'")
integration = pytest.importorskip("langchain_tests.integration_tests", reason="pip install 'llmjax[test-clients]'")

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def url(smollm2_path: Path, start_server: Any, compile_cache_dir: str) -> Iterator[str]:
    config = EngineConfig(
        model=str(smollm2_path),
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=256 * 2**20,
        compilation_cache_dir=compile_cache_dir,
        served_model_name=("smollm2", "smol"),
    )
    running, stop = start_server(config, ServerConfig(port=0))
    yield running.url
    running.wait_idle()
    assert running.engine.kv_stats().used == 0
    stop()


# The client keeps its connections from test to test, so that all tests have one event loop.
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.filterwarnings("ignore:The test .* is marked")
class TestChatOpenAI(integration.ChatModelIntegrationTests):  # type: ignore[misc, name-defined]
    """Answers of this model are short, and its calls are forced: what is tested is what goes over the wire."""

    url = ""

    @pytest.fixture(autouse=True)
    def _server(self, url: str) -> None:
        type(self).url = f"{url}/v1"

    @property
    def chat_model_class(self) -> Any:
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": self.url,
            "api_key": "none",
            "model": "smollm2",
            "temperature": 0,
            "frequency_penalty": 2.0,  # or it says the same again and again
            "max_tokens": 300,
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "smol"

    @pytest.mark.xfail(reason="the model would have to call by itself, and to stop")
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="the model would have to copy a name in Japanese")
    def test_unicode_tool_call_integration(self, model: Any) -> None:
        super().test_unicode_tool_call_integration(model)

    @pytest.mark.xfail(reason="the model invents properties where a schema does not forbid them")
    def test_structured_output_pydantic_2_v1(self, model: Any) -> None:
        super().test_structured_output_pydantic_2_v1(model)

    @pytest.mark.xfail(reason="the model's JSON has not the form that it is asked for in words")
    def test_json_mode(self, model: Any) -> None:
        super().test_json_mode(model)


class TestChatOpenAIByResponses(TestChatOpenAI):
    """The same by /v1/responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        params = super().chat_model_params
        extra = {"frequency_penalty": params.pop("frequency_penalty")}  # which OpenAI does not have there
        return {**params, "use_responses_api": True, "extra_body": extra}


@pytest.fixture(scope="module")
def url_of_vectors(
    tmp_path_factory: pytest.TempPathFactory, start_server: Any, compile_cache_dir: str
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    config = config_for_vectors("qwen3-embedding", folder, compile_cache_dir, ends=False)
    running, stop = start_server(config, ServerConfig(port=0))
    yield running.url
    stop()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.filterwarnings("ignore:The test .* is marked")
class TestOpenAIEmbeddings(integration.EmbeddingsIntegrationTests):  # type: ignore[misc, name-defined]
    url = ""

    @pytest.fixture(autouse=True)
    def _server(self, url_of_vectors: str) -> None:
        type(self).url = f"{url_of_vectors}/v1"

    @property
    def embeddings_class(self) -> Any:
        return langchain_openai.OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        # Else the client makes tokens of texts, with OpenAI's vocabulary.
        local = {"check_embedding_ctx_length": False}
        return {"base_url": self.url, "api_key": "none", "model": "tiny", "max_retries": 0, **local}
