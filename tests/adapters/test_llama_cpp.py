"""GGUF adapters against llama.cpp's server, which has computed what the golden files say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmjax.adapters.adapter import Adapter
from llmjax.adapters.read import AdapterReader
from llmjax.checkpoint import open_checkpoint
from llmjax.quantization.gguf_export import export_gguf
from tests.adapters.test_golden import Model
from tests.checkpoints import LLAMA_CPP_ADAPTERS
from tests.levels import at_levels

NAMES = sorted(path.name for path in LLAMA_CPP_ADAPTERS.iterdir())
TOLERANCE = 5e-4  # of f32 on both sides, with sums in another order
TOLERANCES = {"gemma": 4e-3}  # llama.cpp looks its activation up in a table of f16
PLACE = 2
END = 2  # the token that the server was not to generate
WRITTEN = ("llama", "llama-half", "qwen3", "qwen3-moe-one-by-one")  # whose bases are written as GGUF


@pytest.mark.parametrize("name", at_levels(NAMES, fast=["llama-half", "qwen2"], slow=NAMES))
def test_log_probabilities_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """For a base that is a folder, whose rows have another order than the adapter's file, and for one of GGUF."""
    folder = LLAMA_CPP_ADAPTERS / name
    scale = float((folder / "scale.txt").read_text())
    with np.load(folder / "golden.npz") as golden:
        tokens, prompt, expected = golden["tokens"], int(golden["prompt"]), golden["logprobs"]
    own = Model((folder / "base.txt").read_text())
    readers = [own.reader]
    if name in WRITTEN:
        export_gguf(own.checkpoint, tmp_path / "base.gguf", scheme="f32")
        base = open_checkpoint(tmp_path / "base.gguf")
        readers.append(AdapterReader(base, base.model_config(), own.reader.shapes, own.reader.most_rank))
    for reader in readers:
        adapter = reader.read(folder / "adapter.gguf", name)
        own.load(PLACE, Adapter.sum_of([(adapter, scale)], digest=name))
        (logits,) = own.run([(tokens, PLACE)])
        wide = logits[prompt - 1 : -1].astype(np.float64)
        found = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
        np.testing.assert_allclose(found, expected, atol=TOLERANCES.get(name, TOLERANCE), rtol=0)
        found[:, END] = -np.inf
        assert found.argmax(-1).tolist() == tokens[prompt:].tolist()
