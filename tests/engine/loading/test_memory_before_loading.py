"""The estimate of a model's memory before loading, compared with what the engine takes when it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.experts import with_stacked_experts
from llmjax.checkpoint.formats.registry import plain_tensors
from llmjax.checkpoint.safetensors import SafetensorsTensor
from llmjax.config import EngineConfig
from llmjax.engine.loading.memory import KV_TYPES, KVFootprint, kv_footprint, weight_bytes
from llmjax.engine.loading.model import load_model
from llmjax.platforms import select_platform
from llmjax.weights.packing import RowStack, pack
from tests.checkpoints import GOLDEN


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_weights_take_what_was_said(name: str) -> None:
    config = EngineConfig(model=str(GOLDEN / name), dtype="float32")
    platform = select_platform(config)
    said = weight_bytes(open_checkpoint(config.model).tensors, platform)
    assert said == load_model(config, platform).num_bytes


def test_tiles_of_each_expert_are_filled_up() -> None:
    parts = {"blocks": np.zeros((3, 10, 2, 16), np.uint8), "scales": np.full((3, 10, 2), 127, np.uint8)}
    name, path = "model.layers.0.mlp.experts.down_proj", Path("model.safetensors")
    stored = {f"{name}_{key}": SafetensorsTensor(name, "U8", array.shape, array, path) for key, array in parts.items()}
    plain = plain_tensors(stored, {"quantization_config": {"quant_method": "mxfp4"}}, path)
    stacks, platform = with_stacked_experts(plain, path), select_platform(EngineConfig(device="cpu"))
    source = stacks[f"{name}.weight"].row_source()
    assert isinstance(source, RowStack) and source.size_out == 10
    assert weight_bytes(stacks, platform) == pack(source, tile=platform.weight_tile).nbytes


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("page_size", [4, 32])
def test_kv_pages_take_what_was_said(kind: str, page_size: int) -> None:
    model = open_checkpoint(GOLDEN / "gemma3").model_config()
    pages = jax.eval_shape(
        lambda: model.layers[0].mixer.state.make(num_pages=10, page_size=page_size, dtype=KV_TYPES[kind])
    )
    one_layer = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)) / (10 * page_size)
    found = kv_footprint(model, KV_TYPES[kind], page_size=page_size)
    assert found.token_bytes == pytest.approx(2 * one_layer)
    assert found.window_bytes == pytest.approx({8: 4 * one_layer})
    assert found.first_token_bytes == pytest.approx(6 * one_layer)


def test_a_model_of_full_attention_has_no_windows() -> None:
    model = open_checkpoint(GOLDEN / "llama").model_config()
    found = kv_footprint(model, jnp.dtype(jnp.bfloat16), page_size=16)
    assert found == KVFootprint(3 * 2 * 2 * 8 * 2, {})
    halved = replace(model, layers=model.layers[:1])
    assert kv_footprint(halved, jnp.dtype(jnp.bfloat16), page_size=16).token_bytes == 2 * 2 * 8 * 2


FOOTPRINTS = st.builds(
    KVFootprint, st.integers(0, 20), st.dictionaries(st.integers(1, 30), st.integers(1, 20), max_size=3)
)


def needed(kv: KVFootprint, tokens: int) -> float:
    return kv.token_bytes * tokens + sum(size * min(tokens, window) for window, size in kv.window_bytes.items())


@given(FOOTPRINTS.filter(lambda kv: kv.first_token_bytes > 0), st.integers(-5, 3000))
def test_as_many_tokens_fit_as_there_is_memory(kv: KVFootprint, num_bytes: int) -> None:
    tokens = kv.tokens_in(num_bytes)
    if tokens is None:
        assert kv.token_bytes == 0
        assert needed(kv, 10**6) <= num_bytes
        return
    assert needed(kv, tokens) <= max(num_bytes, 0)
    assert needed(kv, tokens + 1) > num_bytes
