"""A real model of embeddings, all-MiniLM-L6-v2, against Hugging Face's on the same weights (golden/make_minilm.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmjax import LLM, PoolingParams
from llmjax.errors import InvalidRequest

GOLDEN = Path(__file__).parent / "golden" / "minilm.npz"


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["auto", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_vectors_of_fifty_texts(dtype: str, minilm_path: Path, compile_cache_dir: str) -> None:
    golden = np.load(GOLDEN)
    texts = golden["texts"].tolist()
    llm = LLM(str(minilm_path), dtype=dtype, max_num_seqs=32, compilation_cache_dir=compile_cache_dir)
    assert llm.max_model_len == 256
    with pytest.raises(InvalidRequest, match="more than the context of 256 holds"):  # one of them is longer
        llm.embed(texts, use_tqdm=False)
    params = PoolingParams(truncate_prompt_tokens=-1)
    vectors = np.array([output.outputs.embedding for output in llm.embed(texts, pooling_params=params, use_tqdm=False)])
    assert vectors.shape == golden["vectors"].shape == (50, 384)
    cosines = (vectors * golden["vectors"]).sum(1)
    assert cosines.min() >= 0.9999, [text[:40] for text, cosine in zip(texts, cosines, strict=True) if cosine < 0.9999]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    llm.close()
