"""Models that make a vector of each token (ColBERT, ColPali), and scores by all of them, as by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from llmjax import LLM, PoolingParams
from llmjax.engine.front.scores import max_sim
from llmjax.errors import InvalidRequest
from tests.checkpoints import TOKEN_VECTORS

pytestmark = pytest.mark.jax_api
NAMES = ["colbert", "pylate"]
TOLERANCE = 2e-4


class Served(NamedTuple):
    name: str
    llm: LLM
    golden: dict[str, np.ndarray]

    def text(self, key: str) -> str:
        return self.golden[key].tobytes().decode()

    def keys(self, kind: str) -> list[str]:
        return sorted(key for key in self.golden if key.startswith(kind) and "/" not in key)

    def made(self, key: str, **params: Any) -> Any:
        """What is made of one of the golden contents."""
        given = PoolingParams(prompt_name=key.rstrip("0123456789"), **params)
        return self.llm.encode([self.text(key)], given, use_tqdm=False)[0]


def options(compile_cache_dir: str, **settings: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "page_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 72,
        "kv_cache_memory_bytes": 2**20,
        "compilation_cache_dir": compile_cache_dir,
        "compile_threads": 1,
        **settings,
    }


@pytest.fixture(scope="module", params=NAMES)
def served(request: pytest.FixtureRequest, compile_cache_dir: str) -> Iterator[Served]:
    llm = LLM(str(TOKEN_VECTORS / request.param), **options(compile_cache_dir))
    yield Served(request.param, llm, dict(np.load(TOKEN_VECTORS / request.param / "golden.npz")))
    llm.close()


def test_vectors_of_tokens_are_those_of_the_original(served: Served) -> None:
    for key in [*served.keys("query"), *served.keys("document")]:
        output = served.made(key)
        assert output.prompt_token_ids == served.golden[f"{key}/tokens"].tolist()
        np.testing.assert_allclose(output.outputs.data, served.golden[f"{key}/vectors"], atol=TOLERANCE)


def test_batches_make_the_same_vectors(served: Served) -> None:
    keys = [*served.keys("query"), *served.keys("document")] * 3
    prompts = [served.golden[f"{key}/tokens"].tolist() for key in keys]
    made = served.llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    for key, output in zip(keys, made, strict=True):
        np.testing.assert_allclose(output.outputs.data, served.golden[f"{key}/vectors"], atol=TOLERANCE)


def test_scores_are_sums_of_best_matches(served: Served) -> None:
    documents = [served.text(key) for key in served.keys("document")]
    for key, expected in zip(served.keys("query"), served.golden["scores"], strict=True):
        outputs = served.llm.score(served.text(key), documents, use_tqdm=False)
        np.testing.assert_allclose([output.outputs.score for output in outputs], expected, atol=TOLERANCE)


def test_a_vector_of_the_text_is_refused(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="a vector of each token of a text, not one of the text") as error:
        served.llm.embed(["w5"], use_tqdm=False)
    assert error.value.field == "task"


def test_vectors_are_cut_and_left_as_long_as_they_are(served: Served) -> None:
    whole, cut = served.made("query0"), served.made("query0", dimensions=20)
    expected = whole.outputs.data[:, :20] / np.linalg.norm(whole.outputs.data[:, :20], axis=1, keepdims=True)
    np.testing.assert_allclose(cut.outputs.data, expected, atol=1e-6)
    assert not np.allclose(np.linalg.norm(served.made("query0", normalize=False).outputs.data, axis=1), 1, atol=1e-2)


def test_the_formula_of_max_sim() -> None:
    query, document = np.array([[1, 0], [0, 1]], np.float32), np.array([[0.6, 0.8], [0.8, -0.6]], np.float32)
    assert max_sim(query, document) == pytest.approx(0.8 + 0.8)
