"""Descriptions of an engine as plain data."""

from __future__ import annotations

import pytest

from llmjax.engine.description import describe_activations
from llmjax.kernels.qtensor import INT8_DECODES, INT8_VECTORS

SAME = "the same tokens in any batch"


@pytest.mark.parametrize(
    ("activations", "cpu", "said"),
    [
        ({"float"}, True, "not rounded to int8"),
        ({"int8"}, True, f"int8 but for outliers, each row in its own way: {SAME}"),
        ({INT8_VECTORS}, True, f"int8 but for outliers, each row in its own way: {SAME}"),
        ({INT8_DECODES}, True, f"int8 where tokens are generated, bfloat16 in prompts; --batch-invariant: {SAME}"),
        ({"fp8"}, False, "fp8"),
    ],
)
def test_whether_tokens_depend_on_the_batch_is_said(activations: set[str], cpu: bool, said: str) -> None:
    assert describe_activations(activations, cpu=cpu) == said
