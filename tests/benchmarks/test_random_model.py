"""Random models: files that the engine's own reader accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.random_model import SHAPES, write_random_model
from llmjax.checkpoint import open_checkpoint


def test_a_random_model_opens(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    write_random_model(tmp_path, shape, max_position_embeddings=128)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["num_hidden_layers"] == shape.num_hidden_layers
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == shape.tensors()
    embedding = checkpoint.tensors["model.embed_tokens.weight"].read(np.dtype(np.float32))
    assert abs(embedding.std() - shape.hidden_size**-0.5) < 0.01
    assert np.array_equal(checkpoint.tensors["model.norm.weight"].read(np.dtype(np.float32)), np.ones(64))
    written = (tmp_path / "model.safetensors").stat()
    write_random_model(tmp_path, shape, max_position_embeddings=256)
    assert (tmp_path / "model.safetensors").stat() == written  # weights are made once
    assert open_checkpoint(tmp_path).config["max_position_embeddings"] == 256


def test_shapes_have_the_sizes_that_they_are_named_after() -> None:
    sizes = {name: sum(int(np.prod(s)) for s in shape.tensors().values()) for name, shape in SHAPES.items()}
    assert sizes["135m"] == 134_515_008  # SmolLM2-135M
    assert round(sizes["360m"] / 1e6) == 362
    assert round(sizes["1.5b"] / 1e7) == 154
    assert round(sizes["3b"] / 1e7) == 321
