"""Models that make a vector of each token (ColBERT, ColPali), and scores by all of them, as by transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from llmjax import LLM, PoolingParams
from llmjax.engine.front.scores import max_sim
from llmjax.errors import InvalidRequest
from tests.checkpoints import TOKEN_VECTORS
from tests.vector_models import options

pytestmark = pytest.mark.jax_api
NAMES = ["colbert", "pylate", "colpali", "colqwen2"]
SEEING = ("colpali", "colqwen2")
TOLERANCE = 2e-4


class Served(NamedTuple):
    name: str
    llm: LLM
    golden: dict[str, np.ndarray]

    def content(self, key: str) -> Any:
        """A text, or a prompt of a picture."""
        found = self.golden[key]
        if found.ndim == 1:
            return found.tobytes().decode()
        return {"prompt": "", "multi_modal_data": {"image": Image.fromarray(found)}}

    def keys(self, kind: str) -> list[str]:
        return sorted(key for key in self.golden if key.startswith(kind) and "/" not in key)

    def made(self, key: str, **params: Any) -> Any:
        """What is made of one of the golden contents."""
        content = self.content(key)
        name = key.rstrip("0123456789") if isinstance(content, str) else None
        return self.llm.encode([content], PoolingParams(prompt_name=name, **params), use_tqdm=False)[0]


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


def test_skipped_words_of_documents_have_no_vectors(tmp_path: Path, compile_cache_dir: str) -> None:
    """They are read like others, and queries have vectors of all."""
    folder, golden = tmp_path / "pylate", dict(np.load(TOKEN_VECTORS / "pylate" / "golden.npz"))
    shutil.copytree(TOKEN_VECTORS / "pylate", folder)
    settings, text = folder / "config_sentence_transformers.json", golden["document0"].tobytes().decode()
    words = text.split()[:2]
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "skiplist_words": [*words, "unknown"]}))
    llm = LLM(str(folder), **options(compile_cache_dir))
    try:
        left = ~np.isin(golden["document0/tokens"], [int(word[1:]) for word in words])
        expected = golden["document0/vectors"][left]
        made, query = (llm.encode([text], PoolingParams(prompt_name=name))[0] for name in ("document", "query"))
        assert 0 < len(expected) < len(made.prompt_token_ids) == len(query.outputs.data)
        np.testing.assert_allclose(made.outputs.data, expected, atol=TOLERANCE)
        (score,) = llm.score(golden["query0"].tobytes().decode(), text)
        assert score.outputs.score == pytest.approx(max_sim(golden["query0/vectors"], expected), abs=TOLERANCE)
    finally:
        llm.close()


def test_batches_make_the_same_vectors(served: Served) -> None:
    keys = [*served.keys("query"), *served.keys("document")] * 3
    contents = {key: served.content(key) for key in keys}
    texts = {key: served.golden[f"{key}/tokens"].tolist() for key in keys if isinstance(contents[key], str)}
    prompts = [texts.get(key, contents[key]) for key in keys]
    made = served.llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    for key, output in zip(keys, made, strict=True):
        np.testing.assert_allclose(output.outputs.data, served.golden[f"{key}/vectors"], atol=TOLERANCE)


@pytest.mark.parametrize("room", [7, 16])
def test_chunks_make_the_same_vectors(room: int, compile_cache_dir: str) -> None:
    """A decoder's prompts are cut where a step is full, inside pictures too."""
    name = "colqwen2"
    llm = LLM(str(TOKEN_VECTORS / name), **options(compile_cache_dir, max_num_batched_tokens=room))
    served = Served(name, llm, dict(np.load(TOKEN_VECTORS / name / "golden.npz")))
    try:
        for key in ("query0", "document0", "document2", "document2"):  # the last one is known, and made again
            output = served.made(key)
            np.testing.assert_allclose(output.outputs.data, served.golden[f"{key}/vectors"], atol=TOLERANCE)
            assert output.num_cached_tokens == 0
    finally:
        llm.close()


def test_scores_are_sums_of_best_matches(served: Served) -> None:
    documents = [served.content(key) for key in served.keys("document")]
    for key, expected in zip(served.keys("query"), served.golden["scores"], strict=True):
        outputs = served.llm.score(served.content(key), documents, use_tqdm=False)
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
