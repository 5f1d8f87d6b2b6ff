"""Vectors of texts and of pictures by models that make them with halves of their own: against transformers' models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from llmjax import LLM, PoolingParams
from llmjax.errors import InvalidRequest
from tests.checkpoints import PICTURE_VECTORS
from tests.vector_models import options

pytestmark = pytest.mark.jax_api
NAMES = ["clip", "metaclip2", "siglip"]
COUNT = 3  # of pictures and of texts in each archive


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(PICTURE_VECTORS / name / "golden.npz"))


def picture(name: str, number: int) -> Image.Image:
    return Image.fromarray(golden(name)[f"image{number}"])


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest, compile_cache_dir: str) -> Any:
    llm = LLM(str(PICTURE_VECTORS / request.param), **options(compile_cache_dir))
    yield request.param, llm
    llm.close()


def test_vectors_of_pictures_and_of_texts_are_those_of_transformers(made: tuple[str, LLM]) -> None:
    name, llm = made
    expected = golden(name)
    texts = [expected[f"text{number}"].tobytes().decode() for number in range(COUNT)]
    prompts: list[Any] = [{"prompt": "", "multi_modal_data": {"image": picture(name, i)}} for i in range(COUNT)]
    prompts[1]["prompt"] = "<image>"  # which may be there
    outputs = llm.embed([*prompts, *texts], use_tqdm=False)
    for number, output in enumerate(outputs[:COUNT]):
        np.testing.assert_allclose(output.outputs.embedding, expected[f"image{number}/vector"], atol=2e-5)
        assert len(output.prompt_token_ids) == 1
    for number, output in enumerate(outputs[COUNT:]):
        assert output.prompt_token_ids == expected[f"text{number}/tokens"].tolist()
        np.testing.assert_allclose(output.outputs.embedding, expected[f"text{number}/vector"], atol=2e-5)


def test_a_picture_has_a_prompt_of_its_own(made: tuple[str, LLM]) -> None:
    name, llm = made
    image = picture(name, 0)
    for prompt, problem in (
        ({"prompt": "a cat", "multi_modal_data": {"image": image}}, "a picture or of a text"),
        ({"prompt": "<image> a cat", "multi_modal_data": {"image": image}}, "a picture or of a text"),
        ({"prompt": "", "multi_modal_data": {"image": [image, image]}}, "a vector of one picture; there are 2"),
        ({"prompt": "<image>"}, "1 image placeholders, but there are 0 images"),
        ({"prompt": "many words " * 40}, "tokens"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            llm.embed([prompt], use_tqdm=False)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_in_bf16_point_the_same_way(name: str, compile_cache_dir: str) -> None:
    llm = LLM(str(PICTURE_VECTORS / name), **options(compile_cache_dir, dtype="bfloat16"))
    image = {"prompt": "", "multi_modal_data": {"image": picture(name, 0)}}
    found = llm.embed([image], pooling_params=PoolingParams(normalize=False), use_tqdm=False)[0].outputs.embedding
    llm.close()
    vector = np.array(found)
    assert float(vector @ golden(name)["image0/vector"] / np.linalg.norm(vector)) > 0.999
