"""POST /v1/embeddings of conversations with pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmjax.config import ServerConfig
from tests.serve.pictures import golden, png, seeing, url_of, user

pytestmark = pytest.mark.jax_api


def test_conversations_with_pictures_have_vectors(start_server: Any, compile_cache_dir: str) -> None:
    running, stop = start_server(seeing(compile_cache_dir, runner="pooling"), ServerConfig(port=0))
    pixels = golden("image0")
    try:
        with running.http() as http:

            def vector(array: np.ndarray) -> np.ndarray:
                body = {"model": "seeing", "messages": user(url_of(png(array)))}
                response = http.post("/v1/embeddings", json=body)
                assert response.status_code == 200, response.text
                found = response.json()
                assert found["usage"]["prompt_tokens"] > len(golden("image0/rows"))
                return np.array(found["data"][0]["embedding"])

            one, again, other = vector(pixels), vector(pixels), vector(255 - pixels)
            np.testing.assert_allclose(one, again, atol=1e-6)
            assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
            assert np.abs(one - other).max() > 1e-3
            bad = {"model": "seeing", "messages": user("data:image/png;base64,AAAA")}
            assert http.post("/v1/embeddings", json=bad).status_code == 400
    finally:
        stop()
