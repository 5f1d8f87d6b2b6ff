"""Routes of models that make vectors, on real engines with the golden models."""

from __future__ import annotations

import base64
import json
import re
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.serve.protocol.pooling import EmbeddingRequest
from tests.checkpoints import ADAPTERS
from tests.pooled_models import RERANKER, golden, pair, split_prompt, words, write_with_tokenizer
from tests.serve.conftest import Running
from tests.serve.test_bench import bench
from tests.serve.test_wrong_types import check_fields


def config(name: str, folder: Path, cache: str, *, ends: bool, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(write_with_tokenizer(name, folder, ends=ends)),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_num_queued_reqs=8,
        served_model_name="tiny",
        compilation_cache_dir=cache,
        compile_threads=1,
        **settings,
    )


TEMPLATE = (
    "{% for m in messages %}{{ 'w7' if m.role == 'user' else 'w8' }} {{ m.content }} {% endfor %}"
    "{% if word is defined %}{{ word }} {% endif %}{% if add_generation_prompt %}w8{% endif %}"
)


@pytest.fixture(scope="module", params=["thread", "process"])
def embedder(
    request: Any, tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str, start_server: Callable[..., Any]
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("models")
    own = {"engine_process": request.param, "chat_template": TEMPLATE}
    settings = config("qwen3-embedding", folder, compile_cache_dir, ends=False, **own)
    server, stop = start_server(settings, ServerConfig(port=0))
    yield server
    stop()


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str, start_server: Callable[..., Any]
) -> Iterator[Running]:
    """The embedder with a tokenizer that puts tokens around a text."""
    settings = config("qwen3-embedding", tmp_path_factory.mktemp("models"), compile_cache_dir, ends=True)
    server, stop = start_server(settings, ServerConfig(port=0))
    yield server
    stop()


@pytest.fixture(scope="module")
def reranker(
    tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str, start_server: Callable[..., Any]
) -> Iterator[Running]:
    settings = config("bert-reranker", tmp_path_factory.mktemp("models"), compile_cache_dir, ends=True)
    server, stop = start_server(settings, ServerConfig(port=0))
    yield server
    stop()


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    with server.http() as http:
        return http.post(path, json=body)


def test_openai_s_client_gets_embeddings(embedder: Running) -> None:
    found = golden("qwen3-embedding")
    texts = [words(found[f"{case}/tokens"]) for case in ("long", "short", "one")]
    answer = embedder.client().embeddings.create(model="tiny", input=texts)  # which asks for base64
    assert [entry.index for entry in answer.data] == [0, 1, 2] and answer.model == "tiny"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 40 + 17 + 1
    for case, entry in zip(("long", "short", "one"), answer.data, strict=True):
        assert np.dot(entry.embedding, found[f"{case}/vector"]) >= 0.99999


def test_vectors_with_an_adapter_and_without(
    tmp_path: Path, compile_cache_dir: str, start_server: Callable[..., Any]
) -> None:
    """The adapter is asked for by its name, as a model, and its vector is PEFT's."""
    adapter = ADAPTERS / "embedder"
    settings = config("qwen3-embedding", tmp_path, compile_cache_dir, ends=False, lora_modules=[f"own={adapter}"])
    server, stop = start_server(settings, ServerConfig(port=0))
    with np.load(adapter / "golden.npz") as arrays:
        tokens, expected = arrays["tokens"].tolist(), arrays["logits"]
    try:
        vectors = {}
        for path, model in (("/v1/embeddings", "own"), ("/v1/embeddings", "tiny"), ("/pooling", "own")):
            answer = post(server, path, model=model, input=tokens)
            assert answer.status_code == 200 and answer.json()["model"] == model, answer.text
            (entry,) = answer.json()["data"]
            vectors[path, model] = np.array(entry.get("embedding", entry.get("data")))
        np.testing.assert_allclose(vectors["/v1/embeddings", "own"], expected, atol=2e-4)
        np.testing.assert_allclose(vectors["/pooling", "own"], expected, atol=2e-4)
        assert np.abs(vectors["/v1/embeddings", "tiny"] - expected).max() > 0.1
        assert post(server, "/v1/embeddings", model="nobody", input=tokens).status_code == 404
    finally:
        stop()


@pytest.mark.parametrize("form", ["float", "base64"])
def test_token_ids_and_forms_of_numbers(embedder: Running, form: str) -> None:
    found = golden("qwen3-embedding")
    tokens = found["short/tokens"].tolist()
    for given in (tokens, [tokens]):
        (entry,) = post(embedder, "/v1/embeddings", input=given, encoding_format=form, dimensions=9).json()["data"]
        vector = entry["embedding"]
        if form == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        head = found["short/vector"][:9]
        np.testing.assert_allclose(vector, head / np.linalg.norm(head), atol=1e-4)
        assert entry["object"] == "embedding"


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"input": "w3 w4", "add_special_tokens": True}, [[1, 3, 4, 2]]),
        ({"input": "w3 w4", "add_special_tokens": None}, [[1, 3, 4, 2]]),
        ({"input": "w3 w4", "add_special_tokens": False}, [[3, 4]]),
        ({"input": ["w3 w4", "w5"], "add_special_tokens": False}, [[3, 4], [5]]),
        ({"input": [[1, 3], [4]], "add_special_tokens": False}, [[1, 3], [4]]),
        ({"input": "[CLS] w3", "add_special_tokens": False}, [[1, 3]]),
        ({"input": "w3 w4 w5", "add_special_tokens": True, "truncate_prompt_tokens": 3}, [[1, 3, 2]]),
        ({"input": "w3 w4 w5", "add_special_tokens": False, "truncate_prompt_tokens": 2}, [[3, 4]]),
        ({"input": "w3 " * 2000, "add_special_tokens": False, "truncate_prompt_tokens": -1}, [[3] * 64]),
    ],
    ids=lambda value: str(value)[:80],
)
def test_special_tokens_are_left_out_if_asked(ended: Running, body: dict[str, Any], ids: list[list[int]]) -> None:
    expected = post(ended, "/v1/embeddings", input=ids).json()
    for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        found = post(ended, path, **body).json()
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
        for entry, wanted in zip(found["data"], expected["data"], strict=True):
            np.testing.assert_allclose(entry[key], wanted["embedding"], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"input": ""}, "input", "the prompt has no tokens"),
        ({"input": "w3 " * 65}, "input", "has 65 tokens; this model takes at most 64"),
        ({"input": "w3 " * 20_000}, "input", "the context of 64"),
        ({"input": "w3", "truncate_prompt_tokens": 10**12}, "truncate_prompt_tokens", "above the 64 tokens"),
        ({"input": "w3", "prompt_name": "nobody"}, "prompt_name", "has no prompt 'nobody'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_without_special_tokens(ended: Running, body: dict[str, Any], param: str, says: str) -> None:
    answer = post(ended, "/v1/embeddings", add_special_tokens=False, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and says in error["message"]


TWO = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}]
SYSTEM = [{"role": "system", "content": [{"type": "text", "text": "w6"}]}]


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"messages": TWO}, ["w7 w3 w4 w8 w5"]),
        ({"messages": [TWO, SYSTEM]}, ["w7 w3 w4 w8 w5", "w8 w6"]),
        ({"messages": TWO, "add_generation_prompt": True}, ["w7 w3 w4 w8 w5 w8"]),
        ({"messages": TWO, "continue_final_message": True}, ["w7 w3 w4 w8 w5"]),
        ({"messages": TWO, "chat_template_kwargs": {"word": "w9"}}, ["w7 w3 w4 w8 w5 w9"]),
        ({"messages": TWO * 40, "truncate_prompt_tokens": 3}, ["w7 w3 w4"]),
        ({"messages": TWO * 40, "truncate_prompt_tokens": -1}, [" ".join(["w7 w3 w4 w8 w5"] * 40)]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_vectors_of_conversations(embedder: Running, body: dict[str, Any], texts: list[str]) -> None:
    expected = post(embedder, "/v1/embeddings", input=texts, truncate_prompt_tokens=-1).json()
    found = post(embedder, "/v1/embeddings", **body).json()
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    for entry, wanted in zip(found["data"], expected["data"], strict=True):
        np.testing.assert_allclose(entry["embedding"], wanted["embedding"], atol=1e-5)
    whole = post(embedder, "/pooling", **body).json()["data"]
    np.testing.assert_allclose([entry["data"] for entry in whole], [e["embedding"] for e in found["data"]], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": TWO, "input": "w3"}, "input"),
        ({"messages": [TWO, [{"role": "user"}]]}, "messages.1.0.content"),
        ({"messages": [TWO, SYSTEM * 80]}, "messages.1"),
        ({"messages": [TWO] * 129}, "messages"),
        ({"messages": TWO, "prompt_name": "query"}, "prompt_name"),
        ({"messages": TWO, "chat_template": "w3"}, "chat_template"),
        ({"messages": TWO, "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"messages": TWO, "model": "other"}, "model"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_conversations_cannot_have(embedder: Running, body: dict[str, Any], param: str) -> None:
    answer = post(embedder, "/v1/embeddings", **body)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param


def test_variables_that_a_template_does_not_read_are_said(embedder: Running) -> None:
    answer = post(embedder, "/v1/embeddings", messages=[TWO, SYSTEM], chat_template_kwargs={"word": "w9", "other": 1})
    assert answer.headers["x-ignored-fields"] == "chat_template_kwargs.other"


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        ({}, "=f4"),
        ({"endianness": "big"}, ">f4"),
        ({"embed_dtype": "float16", "endianness": "little"}, "<f2"),
        ({"embed_dtype": "float16", "endianness": "big"}, ">f2"),
    ],
    ids=str,
)
def test_vectors_as_bytes(embedder: Running, asked: dict[str, str], dtype: str) -> None:
    """Which bytes they are, tests/serve/test_vector_forms.py says; here they are those of the texts, in their order."""
    texts = ["w3 w4", "w5", "w6 w7 w8"]
    rows = [row["embedding"] for row in post(embedder, "/v1/embeddings", input=texts).json()["data"]]
    size = np.dtype(dtype).itemsize * len(rows[0])

    def check(vectors: list[bytes]) -> None:
        numbers = [np.frombuffer(vector, dtype).astype(np.float32) for vector in vectors]
        np.testing.assert_allclose(numbers, rows, rtol=2**-10, atol=1e-5)

    text = post(embedder, "/v1/embeddings", input=texts, encoding_format="base64", **asked).json()["data"]
    check([base64.b64decode(row["embedding"]) for row in text])
    for form in ("bytes", "bytes_only"):
        answer = post(embedder, "/v1/embeddings", input=texts, encoding_format=form, **asked)
        assert answer.headers["content-type"] == "application/octet-stream"
        assert len(answer.content) == 3 * size
        check([answer.content[i * size : (i + 1) * size] for i in range(3)])
        assert ("metadata" in answer.headers) == (form == "bytes")
        if form == "bytes":
            said = json.loads(answer.headers["metadata"])
            assert said["model"] == "tiny" and said["usage"]["prompt_tokens"] == 6
            for i, entry in enumerate(said["data"]):
                assert entry == {
                    "index": i,
                    "embed_dtype": asked.get("embed_dtype", "float32"),
                    "endianness": asked.get("endianness", "native"),
                    "start": i * size,
                    "end": (i + 1) * size,
                    "shape": [len(rows[0])],
                }


def test_vectors_of_tokens_as_bytes(embedder: Running) -> None:
    asked = {"input": ["w3 w4 w5", "w6"], "task": "token_embed"}
    rows = post(embedder, "/pooling", **asked).json()["data"]
    answer = post(embedder, "/pooling", **asked, encoding_format="bytes", embed_dtype="bfloat16", endianness="little")
    said = json.loads(answer.headers["metadata"])["data"]
    assert [entry["shape"] for entry in said] == [[3, 32], [1, 32]]
    for entry, row in zip(said, rows, strict=True):
        half = np.frombuffer(answer.content[entry["start"] : entry["end"]], "<u2").astype(np.uint32) << 16
        np.testing.assert_allclose(half.view(np.float32).reshape(entry["shape"]), row["data"], rtol=2**-8, atol=1e-5)


def test_fields_of_bytes_beside_numbers_are_named(embedder: Running) -> None:
    answer = post(embedder, "/v1/embeddings", input="w3", embed_dtype="float16", endianness="big")
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "embed_dtype,endianness"


def test_a_header_describes_so_many_vectors(embedder: Running) -> None:
    error = post(embedder, "/v1/embeddings", input=["w3"] * 513, encoding_format="bytes").json()["error"]
    assert error["param"] == "input" and "bytes_only" in error["message"] and embedder.engine.num_requests == 0
    answer = post(embedder, "/v1/embeddings", input=["w3"] * 512, encoding_format="bytes")
    assert len(answer.headers["metadata"]) < 2**16 and len(answer.content) == 512 * 32 * 4


def test_a_list_longer_than_the_queue(embedder: Running) -> None:
    texts = [f"w{3 + i % 90} w{3 + i * 7 % 90}" for i in range(50)]  # 12 are all that run and wait
    answer = post(embedder, "/v1/embeddings", input=texts)
    assert answer.status_code == 200 and len(answer.json()["data"]) == 50
    (alone,) = post(embedder, "/v1/embeddings", input=texts[37]).json()["data"]
    assert np.dot(alone["embedding"], answer.json()["data"][37]["embedding"]) >= 0.99999
    embedder.wait_idle()


def test_who_leaves_takes_a_list_along(embedder: Running) -> None:
    """Sent, seen at work, given up: what runs and what would have followed goes, with its pages."""
    content = json.dumps({"input": [" ".join(f"w{3 + (i + k) % 90}" for k in range(60)) for i in range(2000)]}).encode()
    url = httpx.URL(embedder.url)
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port or 0)) as sock:
        sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        while not embedder.engine.num_requests:
            assert not select.select([sock], [], [], 0.001)[0], "answered"
    embedder.wait_idle()
    assert post(embedder, "/v1/embeddings", input="w3").status_code == 200
    embedder.wait_idle()
    with embedder.http() as http:
        (line,) = re.findall(r"^vllm:kv_cache_usage_perc\S* (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert float(line) == 0


def test_an_answer_is_bounded(embedder: Running) -> None:
    texts = [" ".join(["w3"] * 17)] * 16_384  # each in itself is nothing special
    answer = post(embedder, "/pooling", input=texts, task="token_embed")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "input"
    assert f"would have {17 * 32 * 16_384} numbers together; at most {2**23} are allowed" in error["message"]
    assert embedder.engine.num_requests == 0


def test_all_inputs_are_read_before_any_is_computed(embedder: Running) -> None:
    answer = post(embedder, "/v1/embeddings", input=["w3", "w4", "w5 " * 70])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input"
    assert answer.json()["error"]["code"] == "context_length_exceeded" and embedder.engine.num_requests == 0


def test_vectors_of_tokens(embedder: Running) -> None:
    (entry,) = post(embedder, "/pooling", input="w3 w4 w5", task="token_embed").json()["data"]
    (whole,) = post(embedder, "/pooling", input="w3 w4 w5").json()["data"]
    assert np.shape(entry["data"]) == (3, 32)
    np.testing.assert_allclose(entry["data"][-1], whole["data"], atol=1e-5)


def test_scores_of_embeddings(embedder: Running) -> None:
    vectors = post(embedder, "/v1/embeddings", input=["w3 w4", "w5"]).json()["data"]
    (entry,) = post(embedder, "/score", text_1="w3 w4", text_2="w5").json()["data"]
    expected = np.dot(vectors[0]["embedding"], vectors[1]["embedding"])
    assert entry["object"] == "score" and entry["score"] == pytest.approx(expected, abs=1e-5)
    assert post(embedder, "/invocations", text_1="w3 w4", text_2="w5").json()["data"] == [entry]
    assert post(embedder, "/invocations", input=["w3 w4", "w5"]).json()["data"] == vectors


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/invocations"])
def test_the_best_document_comes_first(reranker: Running, path: str) -> None:
    found = golden("bert-reranker")
    query, document = pair(found["long/tokens"], found["long/types"])
    documents: list[Any] = [document, "w9", "w50 w51 w52"]
    answer = post(reranker, path, model="tiny", query=query, documents=documents).json()
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert scores[0] == pytest.approx(1 / (1 + np.exp(-found["long/vector"][0])), abs=1e-4)
    order = [entry["relevance_score"] for entry in answer["results"]]
    assert sorted(scores) == [0, 1, 2] and order == sorted(order, reverse=True)
    assert all(entry["document"]["text"] == documents[entry["index"]] for entry in answer["results"])
    objects = [{"text": text} for text in documents]
    first = post(reranker, path, query=query, documents=objects, top_n=1, return_documents=False).json()["results"]
    assert first == [{"index": answer["results"][0]["index"], "relevance_score": order[0]}]
    assert answer["usage"]["total_tokens"] > 40


@pytest.mark.slow
def test_a_language_model_reranks(tmp_path: Path, compile_cache_dir: str, start_server: Callable[..., Any]) -> None:
    found = golden("qwen3-reranker")
    template, query, document = split_prompt(found["long/tokens"])
    own = {"hf_overrides": RERANKER, "chat_template": template, "engine_process": "process"}
    settings = config("qwen3-reranker", tmp_path, compile_cache_dir, ends=False, **own)
    server, stop = start_server(settings, ServerConfig(port=0))
    try:
        expected = 1 / (1 + np.exp(-found["long/vector"][0]))
        (entry,) = post(server, "/score", text_1=query, text_2=document).json()["data"]
        assert entry["score"] == pytest.approx(expected, abs=1e-5)
        results = post(server, "/rerank", query=query, documents=["w5", document], top_n=2).json()["results"]
        by_index = {result["index"]: result["relevance_score"] for result in results}
        assert by_index[1] == pytest.approx(expected, abs=1e-5) and results[0]["index"] == max(
            by_index, key=lambda index: by_index[index]
        )
        told, named_otherwise = (
            post(server, "/rerank", query=query, documents=[document], **{name: "w90 w91"}).json()
            for name in ("instruction", "instruct")
        )
        assert told["usage"]["prompt_tokens"] == len(found["long/tokens"]) + 1
        scores = [answer["results"][0]["relevance_score"] for answer in (told, named_otherwise)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5) and abs(scores[0] - expected) > 1e-4
    finally:
        stop()


def test_scores_of_pairs_and_labels(reranker: Running) -> None:
    found = golden("bert-reranker")
    first, second = pair(found["short/tokens"], found["short/types"])
    expected = pytest.approx(1 / (1 + np.exp(-found["short/vector"][0])), abs=1e-4)
    for path in ("/score", "/v1/score"):
        (entry,) = post(reranker, path, text_1=[first], text_2=[second]).json()["data"]
        assert entry["score"] == expected
    for names in (("data_1", "data_2"), ("queries", "items"), ("queries", "documents")):
        (entry,) = post(reranker, "/score", **dict(zip(names, (first, [second]), strict=True))).json()["data"]
        assert entry["score"] == expected
    plain = [
        post(reranker, "/classify", input=["w3 w4"], add_special_tokens=False),
        post(reranker, "/classify", input=[3, 4]),
    ]
    assert [answer.json()["usage"]["prompt_tokens"] for answer in plain] == [2, 2]
    ours, wanted = (answer.json()["data"][0]["probs"] for answer in plain)
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    (label,) = post(reranker, "/classify", input="w3 w4").json()["data"]
    assert abs(label["probs"][0] - wanted[0]) > 1e-4
    assert label["label"] == "LABEL_0" and label["num_classes"] == 1 and 0 < label["probs"][0] < 1


@pytest.mark.parametrize("special", [True, None, False])
def test_special_tokens_of_pairs_are_left_out_if_asked(reranker: Running, special: bool | None) -> None:
    tokens = 3 if special is False else 6
    answers = [
        post(reranker, path, text_1="w3 w4", text_2="w5", add_special_tokens=special)
        for path in ("/score", "/v1/score")
    ] + [
        post(reranker, path, query="w3 w4", documents=["w5"], add_special_tokens=special)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ]
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [tokens] * 5
    scores = [answer.json()["data"][0]["score"] for answer in answers[:2]]
    scores += [answer.json()["results"][0]["relevance_score"] for answer in answers[2:]]
    (usual,) = post(reranker, "/score", text_1="w3 w4", text_2="w5").json()["data"]
    for score in scores:
        assert (abs(score - usual["score"]) < 1e-5) == (special is not False)


REFUSED = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w3"}]}, "/classify, /score, /rerank"),
    ("/v1/completions", {"prompt": "w3"}, "this model classifies texts: it is served at /classify"),
    ("/v1/embeddings", {"input": "w3"}, "this model classifies texts"),
    ("/rerank", {"query": "w3", "documents": []}, "`documents` is empty"),
    ("/rerank", {"query": "w3", "documents": [{"title": "w4"}]}, "`documents.0` has no text"),
    ("/rerank", {"query": "w3", "documents": ["w4"], "instruction": "w5"}, "its template has no instruction"),
    ("/rerank", {"query": "w3", "documents": ["w4"], "top": 3}, "unknown field `top`; did you mean `top_n`?"),
    ("/rerank", {"query": "w3", "documents": ["w4"], "max_tokens_per_doc": 9}, "`max_tokens_per_doc` is not supported"),
    ("/score", {"text_1": ["w3", "w4"], "text_2": ["w3", "w4", "w5"]}, "2 and 3 texts cannot be compared"),
    ("/score", {"text_1": "w3", "data_2": "w4"}, "the request has data_2, text_1"),
    ("/score", {"queries": "w3", "documents": "w4", "items": "w5"}, "the request has documents, items, queries"),
    ("/score", {}, "`text_1` and `text_2`, or `data_1` and `data_2`, or `queries` and `items`, or `queries` and"),
    ("/score", {"text_1": "w3", "text_2": "w4", "max_tokens_per_query": 9}, "`max_tokens_per_query` is not supported;"),
    ("/classify", {"input": []}, "`input` is empty"),
    ("/classify", {"input": [3, 4000]}, "token id 4000"),
    ("/classify", {"input": "w3 " * 70}, "the text has 72 tokens; this model takes at most 64"),
    ("/classify", {"input": ["w3", 4]}, "`input"),
    ("/classify", {"input": "w3", "truncate_prompt_tokens": 65}, "above the 64 tokens"),
    ("/classify", {"input": ["w3"] * 20_000}, "has 20000 entries; at most 16384 are allowed"),
    ("/pooling", {"input": "w3", "dimensions": 4}, "dimensions are of embeddings"),
    ("/pooling", {"input": "w3", "task": "embed"}, "this model is made to classify texts"),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_cannot_be_served(reranker: Running, path: str, body: dict[str, Any], message: str) -> None:
    answer = post(reranker, path, **body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    assert "\n" not in answer.json()["error"]["message"]
    assert post(reranker, "/classify", input="w3").status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
def test_a_model_that_generates_says_what_it_serves(running: Running, path: str) -> None:
    answer = post(running, path, input="abc")
    assert answer.status_code == 400
    assert "this model generates text: it is served at /v1/chat/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("backend", "data"),
    [("openai-embeddings", "random"), ("vllm-pooling", "random"), ("vllm-rerank", "random-rerank")],
)
def test_a_load_of_each_kind(embedder: Running, tmp_path: Path, backend: str, data: str) -> None:
    """A load of each kind that ``llmjax bench serve`` makes."""
    flags = ["--backend", backend, "--dataset-name", data, "--random-batch-size", "2", "--num-prompts", "6"]
    found = bench(embedder, tmp_path, *flags, "--percentile-metrics", "e2el", "--random-vocab-size", "20")
    assert found["total_input_sequences"] == 6 and found["input_sequence_throughput"] > 0
    assert found["total_input_tokens"] > 0 and found["total_output_tokens"] == 0
    assert found["mean_e2el_ms"] > 0 and "mean_ttft_ms" not in found


def test_cohere_s_embed(embedder: Running) -> None:
    found = golden("qwen3-embedding")
    cases = ("long", "short", "one")
    texts = [words(found[f"{case}/tokens"]) for case in cases]
    types = ["float", "base64", "ubinary", "binary", "float"]
    answer = post(embedder, "/v2/embed", model="tiny", texts=texts, input_type="clustering", embedding_types=types)
    body = answer.json()
    assert answer.headers["x-ignored-fields"] == "input_type"  # the model has no prompt for it
    assert body["texts"] == texts and body["meta"]["tokens"] == {"input_tokens": 40 + 17 + 1}
    assert list(body["embeddings"]) == ["float", "base64", "ubinary", "binary"]
    for i, case in enumerate(cases):
        expected = found[f"{case}/vector"]
        vector = np.array(body["embeddings"]["float"][i])
        assert np.dot(vector, expected) >= 0.99999
        packed = np.frombuffer(base64.b64decode(body["embeddings"]["base64"][i]), "<f4")
        assert np.allclose(packed, vector, atol=1e-6)
        bits = [sum((vector[8 * at + k] >= 0) << (7 - k) for k in range(8)) for at in range(len(vector) // 8)]
        assert body["embeddings"]["ubinary"][i] == bits
        assert body["embeddings"]["binary"][i] == [value - 128 for value in bits]
    parts = [{"content": [{"type": "text", "text": text}]} for text in texts]
    again = post(embedder, "/v2/embed", inputs=parts).json()["embeddings"]
    assert list(again) == ["float"] and np.allclose(again["float"], body["embeddings"]["float"], atol=1e-5)
    asked = post(embedder, "/v2/embed", texts=texts[1:2], input_type="search_query")
    prompted = post(embedder, "/v1/embeddings", input=texts[1], prompt_name="query").json()
    assert "x-ignored-fields" not in asked.headers
    assert asked.json()["meta"]["tokens"]["input_tokens"] == prompted["usage"]["prompt_tokens"] > 17
    assert np.allclose(asked.json()["embeddings"]["float"], [prompted["data"][0]["embedding"]], atol=1e-5)
    cut = post(embedder, "/v2/embed", texts=texts[:1], max_tokens=5).json()
    assert cut["meta"]["tokens"]["input_tokens"] == 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["w3"], "inputs": []}, "texts"),
        ({"texts": ["w3"] * (2**14 + 1)}, "texts"),
        ({"texts": [3]}, "texts.0"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs.0.content"),
        ({"texts": ["w3"], "images": ["x"]}, "images"),
        ({"texts": ["w3"], "embedding_types": ["int8"]}, "embedding_types.0"),
        ({"texts": ["w3"], "output_dimension": 10**6}, "output_dimension"),
        ({"texts": ["w3"], "output_dimension": 0}, "output_dimension"),
        ({"texts": ["w3"], "embedding_types": ["binary"], "output_dimension": 4}, "embedding_types"),
        ({"texts": ["w3"], "truncate": "START"}, "truncate"),
        ({"texts": ["w3"], "truncate": "NONE", "max_tokens": 3}, "max_tokens"),
        ({"texts": ["w3 " * 2000], "truncate": "NONE"}, "texts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cohere_s_embed_cannot_have(embedder: Running, body: dict[str, Any], param: str) -> None:
    answer = post(embedder, "/v2/embed", **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


# Fields of which an error names one where it is about both.
TOGETHER = {
    "/v1/score": ("text_1", "text_2"),
    "/v2/rerank": ("query", "documents"),
    "/v2/embed": ("texts", "inputs"),
    "/v1/embeddings": ("input", "messages"),
}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"padding": "max_length"}, "as long as they are"),
        ({"truncation_side": "left"}, "the end"),
        ({"mm_processor_kwargs": {"x": 1}}, "about pictures"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_fields_that_are_refused_say_why(embedder: Running, fields: dict[str, Any], says: str) -> None:
    (name,) = fields
    answer = post(embedder, "/v1/embeddings", input="w3", **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert says in error["message"]
    for neutral in (None, *EmbeddingRequest.neutral_values[name]):
        assert post(embedder, "/v1/embeddings", input="w3", **{name: neutral}).status_code == 200


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}),
        ("/pooling", {"input": "a"}),
        ("/v2/embed", {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_values_of_all_kinds(embedder: Running, path: str, base: dict[str, Any]) -> None:
    with embedder.http() as http:
        assert check_fields(http, path, base, together=TOGETHER.get(path, ())) == []


def test_values_of_all_kinds_for_labels(reranker: Running) -> None:
    with reranker.http() as http:
        assert check_fields(http, "/classify", {"input": "a"}) == []
