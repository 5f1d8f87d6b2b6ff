"""Every family in the formats that quantized checkpoints are published in: written, and read back as the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmjax.checkpoint import open_checkpoint
from llmjax.quantization.folder_export import export_folder
from llmjax.quantization.plan import SavePlan
from llmjax.quantization.rounding import round_to_nearest
from tests.models.conftest import GOLDEN
from tests.models.test_quantized import CHECKPOINTS

# Schemes of compressed-tensors by what they are called; the tiny matrices are too narrow for groups of columns.
STORED = {"int8": "int8", "W8A8": "w8a8", "fp8": "fp8"}
FAST = ("llama", "gpt2", "qwen3-moe")
F32 = np.dtype(np.float32)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CHECKPOINTS]
)
def test_stored_quantized(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / name)
    for kind, scheme in STORED.items():
        plan = SavePlan.of(source, scheme)
        results = round_to_nearest(plan.tensors, plan.layers)
        export_folder(plan, tmp_path / kind, results=results, write_tokenizer=lambda _: None, shard_bytes=1 << 30)
        found = open_checkpoint(tmp_path / kind)
        assert found.tensors.keys() == source.tensors.keys() and found.quantization == "compressed-tensors"
        assert found.model_config() == source.model_config()
        separate = SavePlan.of(found, scheme).tensors  # experts one by one
        for tensor, scheme_of in plan.layers.items():
            values = plan.tensors[tensor].read(F32)
            scheme_of.quantize(values).dequantize(expected := np.empty_like(values))
            np.testing.assert_array_equal(separate[tensor].read(F32), expected, err_msg=f"{kind} {tensor}")
