"""A family's matrices may be quantized when they are loaded: it computes with them what it does with the numbers that
they stand for, and its logits stay close to those of Hugging Face's model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax.config import EngineConfig
from llmjax.engine.loading.model import load_model
from llmjax.kernels.qtensor import QTensor
from llmjax.models import ModelConfig
from llmjax.platforms import select_platform
from tests.checkpoints import GOLDEN
from tests.divergence import divergence
from tests.levels import at_levels
from tests.models import test_golden
from tests.models.conftest import Stepper

SCHEME = "int8"
SAME = 1e-4  # of logits, with activations of f32: sums are added up in another order
ROUNDED = 0.05  # nats: what rounding all matrices to eight bits does to the chances of the next token
FAST = ("llama", "qwen2-moe")
SLOW = ("gpt2", "gemma3n", "deepseek-v2", "qwen3-next", "gpt-oss", "dbrx", "llama4", "falcon-h1", "kimi-linear")


def one_of_each() -> list[str]:
    """The first checkpoint of each architecture."""
    names = [*test_golden.CHECKPOINTS, *test_golden.MORE, *test_golden.VARIANTS]
    first: dict[str, str] = {}
    for name in names:
        config = json.loads((GOLDEN / name / "config.json").read_text())
        first.setdefault(config["architectures"][0], name)
    return list(first.values())


CHECKPOINTS = one_of_each()


def logits_of(config: ModelConfig, params: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    engine = Stepper(config, params)
    (logits,) = engine.step([(engine.add(tokens), len(tokens))], bucket=48, rows=4)
    return logits


@pytest.mark.parametrize("name", at_levels(CHECKPOINTS, fast=FAST, slow=SLOW))
def test_matrices_of_eight_bits(name: str) -> None:
    folder: Path = GOLDEN / name
    config = EngineConfig(model=str(folder), quantization=SCHEME, dtype="float32", device="cpu", packed_weights_bytes=0)
    loaded = load_model(config, select_platform(config))
    quantized = [weight for weight in loaded.params.values() if isinstance(weight, QTensor)]
    assert quantized
    with np.load(folder / "golden.npz") as case:
        tokens, expected = case["long/tokens"], case["long/logits"]
    plain = {name: w.dequantize() if isinstance(w, QTensor) else w for name, w in loaded.params.items()}
    logits, exact = (logits_of(loaded.config, params, tokens) for params in (loaded.params, plain))
    assert np.abs(logits - exact).max() <= SAME
    assert divergence(expected, logits) <= ROUNDED
