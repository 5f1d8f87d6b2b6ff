"""Rows of padding cost no products: those of every kind of layer are told how many rows are in use."""

from __future__ import annotations

import json
import re

import pytest

from llmjax.kernels.cpu.library import library
from llmjax.models import model_config
from tests.checkpoints import GOLDEN
from tests.models.test_functional import lower

# All kinds of mixers and of feed-forward parts that are computed in steps; and what experts a router chooses from.
KINDS = {
    "deepseek-v3": 8,
    "deepseek-v32": 8,
    "jamba": 6,
    "kimi-linear": 8,
    "lfm2": 0,
    "llama4": 6,
    "minimax": 6,
    "nemotron-h": 0,
    "qwen2-moe": 6,
    "qwen3-next": 8,
    "qwen3_5": 0,
}
PRODUCT = re.compile(
    r"custom_call @llmjax_linears\(.*: \(tensor<16x\d+xf32>, tensor<(\d)xi32>.*-> tensor<16x(\d+)xf32>"
)


@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("name", KINDS)
def test_products_are_told_the_rows_in_use(name: str) -> None:
    config = model_config(json.loads((GOLDEN / name / "config.json").read_text()))
    products = PRODUCT.findall(lower(16, config).as_text())
    assert len(products) > 2
    # Narrow ones are not worth it; the engine gives the head no more rows than sample.
    others = {KINDS[name], 1, config.vocab_size}
    assert not [size for told, size in products if told == "0" and int(size) not in others]
