"""A family's matrices may be quantized when they are loaded: its logits stay close to those of Hugging Face's model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmjax.config import EngineConfig
from llmjax.engine.model import load_model
from llmjax.kernels.qtensor import QTensor
from llmjax.platforms import select_platform
from tests.checkpoints import GOLDEN
from tests.levels import at_levels
from tests.models import test_golden
from tests.models.conftest import Stepper

SCHEME = "int8"
FAST = ("llama", "gemma3n")
SLOW = ("gpt2", "deepseek-v2", "qwen3-next", "gpt-oss", "dbrx", "llama4", "falcon-h1", "kimi-linear")


def one_of_each() -> list[str]:
    """The first checkpoint of each architecture."""
    names = [*test_golden.CHECKPOINTS, *test_golden.MORE, *test_golden.VARIANTS]
    first: dict[str, str] = {}
    for name in names:
        config = json.loads((GOLDEN / name / "config.json").read_text())
        first.setdefault(config["architectures"][0], name)
    return list(first.values())


CHECKPOINTS = one_of_each()


@pytest.mark.parametrize("name", at_levels(CHECKPOINTS, fast=FAST, slow=SLOW))
def test_matrices_of_eight_bits(name: str) -> None:
    folder: Path = GOLDEN / name
    config = EngineConfig(model=str(folder), quantization=SCHEME, dtype="float32", device="cpu", packed_weights_bytes=0)
    loaded = load_model(config, select_platform(config))
    quantized = [weight for weight in loaded.params.values() if isinstance(weight, QTensor)]
    assert quantized
    with np.load(folder / "golden.npz") as case:
        tokens, expected = case["long/tokens"], case["long/logits"]
    engine = Stepper(loaded.config, loaded.params)
    (logits,) = engine.step([(engine.add(tokens), len(tokens))], bucket=48, rows=4)
    assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.8  # wrong weights give about 0
