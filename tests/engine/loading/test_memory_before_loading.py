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
from llmjax.engine.loading.memory import KV_TYPES, KVFootprint, check_weights, kv_footprint, weight_bytes
from llmjax.engine.loading.model import load_model
from llmjax.engine.loading.placement import Placer
from llmjax.errors import ConfigError
from llmjax.platforms import select_platform
from llmjax.weights.packing import RowStack, pack
from tests.checkpoints import GOLDEN


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_weights_take_what_was_said(name: str) -> None:
    config = EngineConfig(model=str(GOLDEN / name), dtype="float32")
    platform = select_platform(config)
    said = weight_bytes(open_checkpoint(config.model).tensors, platform)
    assert said == load_model(config, platform).num_bytes


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(GOLDEN / "llama"), dtype="float32")
    platform = select_platform(config)
    plain = load_model(config, platform).num_bytes
    quantized = load_model(config.replace(quantization="q8_0"), platform).num_bytes
    assert quantized < plain
    monkeypatch.setattr(Placer, "place", lambda *_, **__: pytest.fail("a weight was read"))
    for free, hint in ((plain - 1, "--quantization q8_0 takes 0 MiB; or free"), (1000, "free some memory, or take")):
        monkeypatch.setattr("llmjax.platforms.free_memory", lambda free=free: free)
        with pytest.raises(ConfigError, match=r"the model's weights take .* of memory, and 0 MiB are free") as refused:
            load_model(config, platform)
        assert refused.value.hint.startswith(hint)


def test_a_context_that_does_not_fit_beside_the_weights_is_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(model=str(GOLDEN / "llama"), dtype="float32", max_model_len=64, page_size=4)
    platform = select_platform(config)
    monkeypatch.setattr(Placer, "place", lambda *_, **__: pytest.fail("a weight was read"))
    weights = weight_bytes(open_checkpoint(config.model).tensors, platform)
    monkeypatch.setattr("llmjax.platforms.free_memory", lambda: weights + 4 * 8192)
    with pytest.raises(ConfigError, match="max_model_len 64 needs up to") as refused:
        load_model(config, platform)
    assert "lower max_model_len" in refused.value.hint and "kv_cache_dtype int8" in refused.value.hint


def test_the_first_scheme_that_fits_is_named() -> None:
    sizes = {"q8_0": 80, "q6_k": 60, "q5_k_m": 50, "q4_k_m": 40, "q3_k_m": 30, "q2_k": 20}
    gib = 2**30
    check_weights(100 * gib, 100 * gib, quantized=lambda scheme: pytest.fail("it fits as it is"))
    with pytest.raises(ConfigError) as refused:
        check_weights(100 * gib, 55 * gib, quantized=lambda scheme: sizes[scheme] * gib)
    assert str(refused.value) == (
        "the model's weights take 102,400 MiB of memory, and 56,320 MiB are free; --quantization q5_k_m takes "
        "51,200 MiB; or free some memory, or take a smaller model"
    )


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


def test_a_sequence_takes_a_window_once_and_its_state_twice() -> None:
    assert KVFootprint(10, {8: 3}, 100).bytes_of(20) == 10 * 20 + 3 * 8 + 2 * 100
    assert KVFootprint(10, {8: 3}, 100).bytes_of(5) == 10 * 5 + 3 * 5 + 2 * 100


@given(FOOTPRINTS.filter(lambda kv: kv.first_token_bytes > 0), st.integers(-5, 3000))
def test_as_many_tokens_fit_as_there_is_memory(kv: KVFootprint, num_bytes: int) -> None:
    tokens = kv.tokens_in(num_bytes)
    if tokens is None:
        assert kv.token_bytes == 0
        assert kv.bytes_of(10**6) <= num_bytes
        return
    assert kv.bytes_of(tokens) <= max(num_bytes, 0)
    assert kv.bytes_of(tokens + 1) > num_bytes
