"""Random models: files that the engine's own reader accepts."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_models import MODELS
from benchmarks.random_model import SHAPES, write_random_model
from llmjax.checkpoint import open_checkpoint
from llmjax.models import abstract_model, model_config


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


def test_a_random_mixture_of_experts_opens(tmp_path: Path) -> None:
    shape = SHAPES["tiny-moe"]
    write_random_model(tmp_path, shape, max_position_embeddings=128)
    checkpoint = open_checkpoint(tmp_path)
    config = model_config({**checkpoint.config, "tie_word_embeddings": True})
    _, wanted = abstract_model(config, dtype=jnp.dtype("bfloat16"), activation_dtype=jnp.dtype("bfloat16"))
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == {
        k: v.shape for k, v in wanted.items()
    }
    stack = checkpoint.tensors["model.layers.1.mlp.experts.down_proj.weight"].read(np.dtype(np.float32))
    assert stack.shape == (8, 64, 32)
    assert abs(stack.std() - 0.125) < 0.01


def test_a_token_goes_through_some_experts() -> None:
    assert SHAPES["tiny"].active_numbers == sum(int(np.prod(size)) for size in SHAPES["tiny"].tensors().values())
    shape = MODELS["qwen3-30b-a3b"]
    total = sum(int(np.prod(size)) for size in shape.tensors().values())
    assert round(total / 1e8) == 302  # 30.5 billion with the second embedding
    assert round(shape.active_numbers / 1e8) == 30


def test_shapes_have_the_sizes_that_they_are_named_after() -> None:
    sizes = {name: sum(int(np.prod(s)) for s in shape.tensors().values()) for name, shape in SHAPES.items()}
    assert sizes["135m"] == 134_515_008  # SmolLM2-135M
    assert round(sizes["360m"] / 1e6) == 362
    assert round(sizes["1.5b"] / 1e7) == 154
    assert round(sizes["3b"] / 1e7) == 321
