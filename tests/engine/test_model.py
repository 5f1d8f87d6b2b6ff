"""What is said about a model while it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmjax.config import EngineConfig
from llmjax.engine import model
from llmjax.platforms import select_platform

LLAMA = Path(__file__).parents[1] / "models" / "golden" / "llama"


@pytest.mark.parametrize("quantization,native,lines", [("q8_0", False, 1), ("q8_0", True, 0), ("none", False, 0)])
def test_quantized_weights_without_kernels_are_one_warning(
    quantization: str, native: bool, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model, "library", lambda: "there" if native else None)
    config = EngineConfig(model=str(LLAMA), quantization=quantization, dtype="float32", device="cpu")
    model.load_model(config, select_platform(config))
    assert len([r for r in caplog.records if r.name == model.__name__ and "--quantization none" in r.message]) == lines
