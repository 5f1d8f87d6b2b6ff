"""Text models of Qwen-VL in GGUF files: Qwen's with positions on three axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmjax.checkpoint import open_checkpoint
from llmjax.errors import CheckpointError
from tests.checkpoint.gguf.test_model import HEAD_DIM, KEYS, original_weights, write

HALF = HEAD_DIM // 2
SECTIONS = [HALF - 2, 1, 1]


@pytest.mark.parametrize(("arch", "by_turns"), [("qwen2vl", False), ("qwen3vl", True)])
def test_sections_become_axes(tmp_path: Path, arch: str, by_turns: bool) -> None:
    keys = KEYS | {"rope.dimension_sections": [*SECTIONS, 0]}
    weights = original_weights()
    if by_turns:
        keys |= {"n_deepstack_layers": 2}
        weights |= {f"blk.0.attn_{part}_norm.weight": np.ones(HEAD_DIM, np.float32) for part in "qk"}
    else:
        weights |= {
            f"blk.0.attn_{part}.bias": np.ones(len(weights[f"blk.0.attn_{part}.weight"]), np.float32) for part in "qkv"
        }
    checkpoint = open_checkpoint(write(tmp_path / "model.gguf", arch, keys, weights))
    rope = checkpoint.config["rope_scaling"]
    assert rope["mrope_section"] == SECTIONS and rope.get("mrope_interleaved", False) is by_turns
    (found,) = checkpoint.model_config().ropes
    assert found.axes is not None and sorted(found.axes) == sorted([0] * (HALF - 2) + [1, 2])
    assert checkpoint.vision is None  # there is no encoder beside it


def test_other_sections_are_refused(tmp_path: Path) -> None:
    keys = KEYS | {"rope.dimension_sections": [1, 1, 1, 1]}
    with pytest.raises(CheckpointError, match="is not 3 numbers and a zero"):
        open_checkpoint(write(tmp_path / "model.gguf", "qwen2vl", keys, original_weights()))
