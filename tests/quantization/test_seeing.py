"""Models that see: the text model is quantized, and the encoder stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmjax.checkpoint.checkpoint import open_checkpoint
from llmjax.cli import inspect
from llmjax.conversion import quantize
from tests.checkpoints import SEEING
from tests.engine.test_images import engine_of, prompt_of, scored


@pytest.mark.parametrize(("name", "scheme"), [("qwen2-vl", "int8"), ("gemma3", "fp8")])
def test_the_encoder_is_left_as_it_is(
    name: str, scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "written"
    quantize(str(SEEING / name), str(written), scheme=scheme)
    before, after = open_checkpoint(SEEING / name), open_checkpoint(written)
    assert after.quantization and after.vision == before.vision
    assert after.vision_tensors.keys() == before.vision_tensors.keys() and before.vision_tensors
    f32 = np.dtype(np.float32)
    for key, tensor in after.vision_tensors.items():
        assert tensor.type_name == before.vision_tensors[key].type_name
        np.testing.assert_array_equal(tensor.read(f32), before.vision_tensors[key].read(f32))
    assert any(tensor.row_source() is not None for tensor in after.tensors.values())
    config = json.loads((written / "config.json").read_text())
    assert config["vision_config"] and config["quantization_config"]
    # For readers that quantize whatever is not named.
    assert any("visual" in module or "vision" in module for module in config["quantization_config"]["ignore"])
    assert inspect.main([str(written)]) == 0
    assert f"encoder of {len(before.vision.layers)} layers" in capsys.readouterr().out  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_written_model_sees(tmp_path: Path, compile_cache_dir: str) -> None:
    quantize(str(SEEING / "qwen2-vl"), str(tmp_path / "written"), scheme="int8")
    found = []
    for folder in (None, tmp_path / "written"):
        llm = engine_of("qwen2-vl", compile_cache_dir, folder=folder)
        (output,) = llm.generate([prompt_of("qwen2-vl", "two")], scored(max_tokens=1), use_tqdm=False)
        (entry,) = output.outputs[0].logprobs or []
        found.append(np.array([entry[token].logprob for token in range(len(entry))]))
        llm.close()
    # Eight bits a weight of a random model; another picture moves them by more than one.
    assert 0 < np.abs(found[0] - found[1]).max() < 0.2
