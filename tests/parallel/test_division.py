"""The model of one device of several, and which models cannot be divided."""

from __future__ import annotations

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.errors import ConfigError
from llmjax.models import Attention, Experts, Layer, Mamba2, ModelConfig, abstract_model, model_config
from llmjax.models.layers.shares import NOTHING, HeadShares
from llmjax.parallel.division import Division
from tests.checkpoints import GOLDEN
from tests.models.test_published import config_of as published

FAMILIES = ("llama-bias", "qwen2-moe", "deepseek-v2", "qwen3-next", "qwen3_5", "mpt", "stablelm-2-12b", "gpt-bigcode")
BY_CHANNEL = ("mamba", "falcon-mamba", "jamba", "lfm2", "kimi-linear", "minimax")
OVER_ALL_HEADS = ("olmo2", "olmo3", "olmoe", "minimax-m2", "bitnet")
STATE_SPACES = ("falcon-h1", "falcon-h1-odd", "granite4", "nemotron-h", "mamba2")

MIXTURES = ("qwen2-moe", "deepseek-v2", "mixtral", "gpt-oss")


def config_of(name: str) -> ModelConfig:
    return model_config(json.loads((GOLDEN / name / "config.json").read_text()))


@pytest.mark.parametrize("devices", range(1, 17))
def test_groups_of_a_state_space_whatever_the_number_of_devices(devices: int) -> None:
    """Codestral's 128 heads in 8 groups: no device has many more heads than its part, and all of a group is normed."""
    config = model_config(published("mistralai/Mamba-Codestral-7B-v0.1"))
    mixer = Division(config, devices).local.layers[0].mixer
    assert isinstance(mixer, Mamba2) and mixer.heads % mixer.groups == 0
    assert 128 <= devices * mixer.heads < 128 + 8 * devices
    if mixer.heads % 16:  # groups are cut
        assert mixer.divided is not None and set(mixer.divided.numbers) == set(range(8))
        assert (mixer.divided.groups, mixer.divided.size) == (8, 16 * 64)
        assert len(mixer.divided.numbers) == devices * mixer.groups
    else:
        assert mixer.divided is None


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "whole_experts"),
    [
        *((name, False) for name in (*FAMILIES, *STATE_SPACES, *BY_CHANNEL, *OVER_ALL_HEADS)),
        *((name, True) for name in MIXTURES),
    ],
)
def test_parts_of_parameters_are_those_of_a_devices_model(name: str, whole_experts: bool, devices: int) -> None:
    division = Division(config_of(name), devices, whole_experts=whole_experts)
    graph, whole = abstract_model(division.config, dtype=jnp.float32, activation_dtype=jnp.float32)
    _, local = abstract_model(division.local, dtype=jnp.float32, activation_dtype=jnp.float32)
    for parameter, axes in zip(graph.names, graph.axes, strict=True):
        shape = list(whole[parameter].shape)
        cut = division.cut(parameter, axes, shape)
        if cut is not None:
            assert len(cut.entries) == devices
            shape[cut.axis] = cut.entries.shape[1]
        assert shape == list(local[parameter].shape), parameter


def test_one_device_has_the_model_itself() -> None:
    config = config_of("qwen2-moe")
    assert Division(config, 1).local is config


def test_sizes_of_a_devices_model() -> None:
    local = Division(config_of("qwen2-moe"), 2).local
    mixer, half = local.layers[0].mixer, local.layers[0].feed_forward
    assert isinstance(mixer, Attention) and isinstance(half, Experts)
    assert (mixer.heads, mixer.kv_heads, half.count) == (2, 1, 6)
    assert local.vocab_size == config_of("qwen2-moe").vocab_size // 2


def test_keys_that_devices_share_count_once_where_they_add_up() -> None:
    mixer = Division(config_of("olmo2"), 3).local.layers[0].mixer
    assert isinstance(mixer, Attention) and mixer.divided is not None
    assert (mixer.divided.heads, mixer.divided.kv_heads) == (4, 2)
    keys = HeadShares(2, 2, 3).share_of_keys.ravel()
    for head in range(2):
        assert sum(np.array(mixer.divided.counted)[keys == head]) == pytest.approx(1)
    assert not any(np.array(mixer.divided.counted)[keys == NOTHING])


def test_norms_over_all_heads_that_cannot_be_divided() -> None:
    config = config_of("olmo2")
    for change in ({"qk_norm": Layer(eps=1e-5)}, {"qk_norm_first": False}):
        layers = tuple(replace(layer, mixer=replace(layer.mixer, **change)) for layer in config.layers)
        with pytest.raises(ConfigError, match="tensor_parallel_size 2: norms over all heads that take a mean away"):
            Division(replace(config, layers=layers), 2)


def test_whole_experts_of_a_device() -> None:
    config = config_of("qwen2-moe")
    half = Division(config, 4, whole_experts=True).local.layers[0].feed_forward
    whole = config.layers[0].feed_forward
    assert isinstance(half, Experts) and isinstance(whole, Experts) and half.shared is not None
    assert (half.count, half.stacked, half.inner) == (6, 2, whole.inner)
    assert whole.shared is not None and half.shared.inner < whole.shared.inner  # which all devices share


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("llama", 9, "tensor_parallel_size 9: the model has 4 heads in a layer, and each device needs one"),
        ("gemma3n", 2, "tensor_parallel_size 2: embeddings for each layer cannot be divided yet"),
        ("gemma4-experts", 2, "tensor_parallel_size 2: experts with norms after them cannot be divided yet"),
    ],
)
def test_what_cannot_be_divided(name: str, devices: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Division(config_of(name), devices)
    assert str(caught.value) == message
