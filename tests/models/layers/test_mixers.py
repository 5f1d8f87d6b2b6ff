"""Each mixer answers what `Mixer` asks, for one device and for several."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from llmjax.models.layers.attention import Attention
from llmjax.models.layers.channel_delta import ChannelDelta
from llmjax.models.layers.convolution import ShortConvolution
from llmjax.models.layers.gated_delta import GatedDelta
from llmjax.models.layers.latent import Indexer, LatentAttention
from llmjax.models.layers.lightning import LightningAttention
from llmjax.models.layers.mamba import Mamba
from llmjax.models.layers.mamba2 import Mamba2
from llmjax.models.layers.mixer import Mixer
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.moe import Experts
from llmjax.models.layers.norm import RMS
from llmjax.models.modules.layer import MODULES
from llmjax.models.modules.linear import Linear

NORM = RMS(1e-6)
MIXERS: dict[str, Mixer] = {
    "attention": Attention(heads=8, kv_heads=4, head_dim=16, scale=0.25, rope=None),
    "latent": LatentAttention(
        heads=8, q_rank=None, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16, scale=0.2, rope=None, norm=NORM
    ),
    "channel delta": ChannelDelta(heads=8, head_dim=16, width=4, activation="silu", norm=NORM),
    "gated delta": GatedDelta(
        key_heads=8, value_heads=16, key_dim=16, value_dim=8, width=4, activation="silu", norm=NORM
    ),
    "lightning": LightningAttention(heads=8, head_dim=16, activation="silu", norm=NORM, decay=1.0),
    "mamba": Mamba(inner=512, state_dim=16, rank=4, width=4, activation="silu", norm=None),
    "mamba 2": Mamba2(heads=8, head_dim=16, groups=2, state_dim=16, width=4, activation="silu", norm=NORM),
    "convolution": ShortConvolution(size=512, width=3),
}
# The mixer of each of two devices, its sizes there, and how many devices may divide the whole.
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, int], int]] = {
    "attention": ({"heads": 4, "kv_heads": 2}, {"heads": 4, "KV heads": 2, "head size": 16}, 8),
    "latent": ({"heads": 4}, {"heads": 4}, 8),
    "channel delta": ({"heads": 4}, {"recurrent heads": 4}, 8),
    "gated delta": ({"key_heads": 4, "value_heads": 8}, {"recurrent heads": 8}, 8),
    "lightning": ({"heads": 4, "whole": 8, "decay": 1.0}, {"recurrent heads": 4}, 8),
    "mamba": ({"inner": 256}, {"recurrent channels": 256}, 32),
    "mamba 2": ({"heads": 4, "groups": 1, "divided": None}, {"recurrent heads": 4}, 8),
    "convolution": ({"size": 256}, {}, 32),
}


def test_all_mixers_are_here() -> None:
    assert {type(mixer) for mixer in MIXERS.values()} == set(MODULES) - {Indexer, GatedMLP, MLP, Experts}


@pytest.mark.parametrize("name", MIXERS)
def test_what_each_of_two_devices_has(name: str) -> None:
    mixer, (fields, sizes, divisible) = MIXERS[name], EXPECTED[name]
    local = mixer.local(2)
    assert {key: getattr(local, key) for key in fields} == fields
    assert (local.sizes, mixer.divisible) == (sizes, divisible)


@pytest.mark.parametrize("name", MIXERS)
def test_one_device_has_all(name: str) -> None:
    assert MIXERS[name].local(1).sizes == MIXERS[name].sizes


@pytest.mark.parametrize("name", MIXERS)
def test_an_axis_that_it_does_not_have(name: str) -> None:
    with pytest.raises(ValueError, match="the mixer has no axis 'vocab'"):
        MIXERS[name].share("vocab", 512, 2)


@pytest.mark.parametrize("name", MIXERS)
def test_projections_are_those_of_its_module(name: str) -> None:
    mixer = MIXERS[name]
    module = nnx.eval_shape(lambda: MODULES[type(mixer)](mixer, 512, dtype=jnp.float32))
    made = {name for name, part in vars(module).items() if isinstance(part, Linear)}
    assert made and made <= {each for together in mixer.projections for each in together}
