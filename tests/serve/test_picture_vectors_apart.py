"""POST /v1/embeddings of a model that makes vectors of a picture or of a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmjax.config import EngineConfig, ServerConfig
from tests.checkpoints import PICTURE_VECTORS
from tests.serve.pictures import png, url_of
from tests.vector_models import options

pytestmark = pytest.mark.jax_api


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_picture_or_a_text(start_server: Any, compile_cache_dir: str, name: str) -> None:
    golden = dict(np.load(PICTURE_VECTORS / name / "golden.npz"))
    settings = EngineConfig(
        model=str(PICTURE_VECTORS / name), served_model_name="apart", **options(compile_cache_dir, max_num_seqs=2)
    )
    running, stop = start_server(settings, ServerConfig(port=0))
    text = golden["text1"].tobytes().decode()
    picture = {"type": "image_url", "image_url": {"url": url_of(png(golden["image0"]))}}
    try:
        with running.http() as http:

            def asked(**body: Any) -> Any:
                return http.post("/v1/embeddings", json={"model": "apart", **body})

            for body, expected in (
                ({"messages": [{"role": "user", "content": [picture]}]}, "image0"),
                ({"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}, "text1"),
                ({"input": text}, "text1"),
            ):
                response = asked(**body)
                assert response.status_code == 200, response.text
                vector = response.json()["data"][0]["embedding"]
                np.testing.assert_allclose(vector, golden[f"{expected}/vector"], atol=2e-5)
            both = asked(messages=[{"role": "user", "content": [picture, {"type": "text", "text": text}]}])
            assert both.status_code == 400 and "a picture or of a text" in both.text
            assert http.post("/v1/chat/completions", json={"model": "apart", "messages": []}).status_code in (400, 404)
    finally:
        stop()
