"""What a server does with models that make a vector of each token."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmjax.config import EngineConfig, ServerConfig
from tests.checkpoints import TOKEN_VECTORS
from tests.serve.pictures import png, url_of
from tests.vector_models import options

pytestmark = pytest.mark.jax_api


def settings(name: str, compile_cache_dir: str) -> EngineConfig:
    return EngineConfig(model=str(TOKEN_VECTORS / name), served_model_name=name, **options(compile_cache_dir))


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(TOKEN_VECTORS / name / "golden.npz"))


def text(name: str, key: str) -> str:
    return golden(name)[key].tobytes().decode()


@pytest.fixture(scope="module")
def colbert(start_server: Any, compile_cache_dir: str) -> Iterator[Any]:
    running, stop = start_server(settings("colbert", compile_cache_dir), ServerConfig(port=0))
    with running.http() as http:
        yield http
    stop()


def test_vectors_of_tokens(colbert: Any) -> None:
    expected = golden("colbert")
    body = {"input": text("colbert", "query0"), "prompt_name": "query"}
    for asked in ({}, {"task": "token_embed"}):
        found = colbert.post("/pooling", json={**body, **asked}).json()
        assert found["data"][0]["object"] == "pooling"
        np.testing.assert_allclose(found["data"][0]["data"], expected["query0/vectors"], atol=2e-4)
        assert found["usage"]["prompt_tokens"] == len(expected["query0/tokens"])
    found = colbert.post("/pooling", json={**body, "encoding_format": "base64"}).json()
    vectors = np.frombuffer(base64.b64decode(found["data"][0]["data"]), "<f4").reshape(-1, 36)
    np.testing.assert_allclose(vectors, expected["query0/vectors"], atol=2e-4)
    other = colbert.post("/invocations", json=body).json()
    np.testing.assert_allclose(other["data"][0]["data"], expected["query0/vectors"], atol=2e-4)


def test_scores_and_rankings(colbert: Any) -> None:
    scores = golden("colbert")["scores"]
    documents = [text("colbert", f"document{number}") for number in range(3)]
    query = text("colbert", "query0")
    found = colbert.post("/v1/score", json={"text_1": query, "text_2": documents}).json()
    np.testing.assert_allclose([entry["score"] for entry in found["data"]], scores[0], atol=2e-4)
    found = colbert.post("/v1/rerank", json={"query": query, "documents": documents, "top_n": 2}).json()
    assert [entry["index"] for entry in found["results"]] == np.argsort(-scores[0])[:2].tolist()
    assert found["results"][0]["relevance_score"] == pytest.approx(scores[0].max(), abs=2e-4)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", {"input": "w5"}, "model", "makes a vector of each token: it is served at /pooling"),
        ("/pooling", {"input": "w5", "task": "embed"}, "task", "not one of the text"),
        ("/pooling", {"input": "w5", "task": "token_classify"}, "task", "is made to make embeddings"),
        ("/pooling", {"input": "w5", "dimensions": 37}, "dimensions", "the model's vectors have 36"),
        ("/pooling", {"input": "w5", "prompt_name": "title"}, "prompt_name", "it has: document, query"),
        ("/score", {"text_1": "w5", "text_2": "w6", "instruction": "w7"}, "instruction", "reads no pairs"),
    ],
)
def test_what_does_not_go(colbert: Any, path: str, body: dict[str, Any], param: str, says: str) -> None:
    response = colbert.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]


@pytest.fixture(scope="module", params=["colpali", "colqwen2"])
def pages(request: pytest.FixtureRequest, start_server: Any, compile_cache_dir: str) -> Iterator[tuple[str, Any]]:
    running, stop = start_server(settings(request.param, compile_cache_dir), ServerConfig(port=0))
    with running.http() as http:
        yield request.param, http
    stop()


def page(name: str, number: int, *texts: str) -> dict[str, Any]:
    """A picture as one side of a pair, with texts beside it."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url_of(png(golden(name)[f"document{number}"]))}}
    ]
    return {"content": [*parts, *({"type": "text", "text": each} for each in texts)]}


def test_conversations_are_pages_or_queries(pages: tuple[str, Any]) -> None:
    name, http = pages
    expected = golden(name)
    for key, content in (("document1", page(name, 1)["content"]), ("query0", text(name, "query0"))):
        found = http.post("/pooling", json={"messages": [{"role": "user", "content": content}]}).json()
        np.testing.assert_allclose(found["data"][0]["data"], expected[f"{key}/vectors"], atol=2e-4)
        assert found["usage"]["prompt_tokens"] == len(expected[f"{key}/tokens"])
    found = http.post("/pooling", json={"input": text(name, "query1")}).json()
    np.testing.assert_allclose(found["data"][0]["data"], expected["query1/vectors"], atol=2e-4)


def test_pages_are_scored_and_ranked(pages: tuple[str, Any]) -> None:
    name, http = pages
    scores, query = golden(name)["scores"], text(name, "query0")
    documents = [page(name, 0), page(name, 1, "Describe the image."), page(name, 2)]
    found = http.post("/score", json={"data_1": query, "data_2": documents}).json()
    np.testing.assert_allclose([entry["score"] for entry in found["data"]], scores[0], atol=1e-3)
    found = http.post("/score", json={"queries": query, "documents": documents[2]}).json()
    assert found["data"][0]["score"] == pytest.approx(scores[0, 2], abs=1e-3)
    found = http.post("/rerank", json={"query": query, "documents": [*documents, "a text"]}).json()
    order = [entry["index"] for entry in found["results"] if entry["index"] < 3]
    assert order == np.argsort(-scores[0]).tolist() and len(found["results"]) == 4
    texts = {entry["index"]: entry["document"]["text"] for entry in found["results"]}
    assert texts == {0: "", 1: "", 2: "", 3: "a text"}
    given = {entry["index"]: entry["document"].get("multi_modal") for entry in found["results"]}
    assert given == {0: documents[0]["content"], 1: documents[1]["content"], 2: documents[2]["content"], 3: None}


def test_what_is_no_page(pages: tuple[str, Any]) -> None:
    name, http = pages
    two = {"content": page(name, 0)["content"] * 2}
    wrong = {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    for document, param, says in (
        (two, "documents.1.content", "one page at a time; there are 2 pictures"),
        (page(name, 0, "What is it?"), "documents.1.content", "a page is a picture alone"),
        (wrong, "documents.1.content.0", ""),
        ({"content": [{"type": "audio"}]}, "documents.1.content.0.type", "'audio' parts are not supported"),
    ):
        response = http.post("/rerank", json={"query": "a", "documents": ["b", document]})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"].startswith(param) and says in error["message"], error


def test_models_that_read_texts_see_no_pages(colbert: Any) -> None:
    response = colbert.post("/score", json={"text_1": "w5", "text_2": page("colpali", 0)})
    assert response.status_code == 400 and response.json()["error"]["param"] == "text_2.content.0.type"
    assert "reads text only" in response.json()["error"]["message"]
