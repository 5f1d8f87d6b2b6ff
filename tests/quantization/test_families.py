"""Every family in the formats that quantized checkpoints are published in: written, and read back as the same model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.quantization.folder_export import export_folder
from llmjax.quantization.plan import SavePlan
from llmjax.quantization.rounding import round_to_nearest
from tests.checkpoints import GOLDEN
from tests.models.test_quantized import CHECKPOINTS


@dataclass(frozen=True)
class Stored:
    """A format with a scheme that the tiny matrices are wide enough for: scales are those of whole columns."""

    scheme: str
    form: str = "compressed-tensors"
    aligned: int = 1  # rows of all matrices are multiples of it

    def plan(self, source: Checkpoint) -> SavePlan:
        sizes = {name: tensor.shape[-2] for name, tensor in source.tensors.items() if len(tensor.shape) > 1}
        misfits = (re.escape(name) for name, rows in sizes.items() if rows % self.aligned)
        rules, columns = {f"^{name}$": "none" for name in misfits}, 0 if self.form in ("gptq", "awq") else None
        return SavePlan.of(source, self.scheme, form=self.form, group_size=columns, rules=rules)


STORED = {
    "int8": Stored("int8"),
    "W8A8": Stored("w8a8"),
    "fp8": Stored("fp8"),
    "GPTQ": Stored("int8", "gptq"),
    "AWQ": Stored("int4_asym", "awq", aligned=8),
}
# Some of whose tiny matrices do not fill GPTQ's words, which has no way to leave single ones out.
WITHOUT_GPTQ = ("mamba", "falcon-mamba", "jamba", "kimi-linear")
FAST = ("llama", "gpt2", "qwen3-moe")
F32 = np.dtype(np.float32)


def stored_as(name: str) -> list[str]:
    """Formats in which a checkpoint is written."""
    return [kind for kind in STORED if kind != "GPTQ" or name not in WITHOUT_GPTQ]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CHECKPOINTS]
)
def test_stored_quantized(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / name)
    for kind in stored_as(name):
        plan = STORED[kind].plan(source)
        results = round_to_nearest(plan.tensors, plan.layers)
        export_folder(plan, tmp_path / kind, results=results, write_tokenizer=lambda _: None, shard_bytes=1 << 30)
        found = open_checkpoint(tmp_path / kind)
        assert found.tensors.keys() == source.tensors.keys() and found.quantization == STORED[kind].form
        assert found.model_config() == source.model_config()
        separate = STORED[kind].plan(found).tensors  # experts one by one
        for tensor, scheme_of in plan.layers.items():
            values = plan.tensors[tensor].read(F32)
            scheme_of.quantize(values).dequantize(expected := np.empty_like(values))
            np.testing.assert_array_equal(separate[tensor].read(F32), expected, err_msg=f"{kind} {tensor}")
