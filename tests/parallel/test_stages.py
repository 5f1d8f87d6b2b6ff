"""Which layers each stage of a model has."""

from __future__ import annotations

import pytest

from llmjax.checkpoint import open_checkpoint
from llmjax.errors import ConfigError
from llmjax.models import ModelConfig
from llmjax.parallel.stages import Stage, layers_of
from tests.checkpoints import GOLDEN


def config_of(name: str) -> ModelConfig:
    return open_checkpoint(GOLDEN / name).model_config()


@pytest.mark.parametrize("stages", range(1, 10))
def test_each_layer_is_in_one_stage(stages: int) -> None:
    for layers in range(stages, 40):
        found = [layers_of(layers, number=number, count=stages) for number in range(stages)]
        assert [layer for own in found for layer in own] == list(range(layers))
        sizes = [len(own) for own in found]
        assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


def test_layers_are_where_vllm_has_them() -> None:
    """By its ``get_pp_indices``, run by hand."""
    assert [len(layers_of(7, number=i, count=3)) for i in range(3)] == [2, 3, 2]
    assert [len(layers_of(61, number=i, count=4)) for i in range(4)] == [15, 15, 16, 15]


def test_ends_have_what_stands_before_and_behind_layers() -> None:
    config = config_of("llama")
    first, middle, last = (Stage.of(config, number=number, count=3) for number in range(3))
    assert [(one.config.embeds, one.config.has_head) for one in (first, middle, last)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert middle.config.layers == config.layers[1:2]
    assert middle.stored("model.layers.0.mlp.up_proj.weight") == "model.layers.1.mlp.up_proj.weight"
    assert last.stored("model.norm.weight") == "model.norm.weight"
    assert Stage.of(config, number=0, count=1).config == config


@pytest.mark.parametrize("name", ["gemma3n", "gemma4", "llama"])
def test_one_stage_is_the_whole_model(name: str) -> None:
    assert Stage.of(config_of(name), number=0, count=1).config == config_of(name)


def test_what_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size 4: the model has 3 layers, and each stage needs one"):
        Stage.of(config_of("llama"), number=0, count=4)
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2: a model with embeddings for each layer"):
        Stage.of(config_of("gemma4"), number=0, count=2)


def test_layers_that_share_an_indexer_stay_together() -> None:
    config = config_of("glm-moe-dsa-shared")
    second = Stage.of(config, number=1, count=2).config
    assert [layer.chosen_before for layer in second.layers] == [False, True]
    with pytest.raises(ConfigError, match="share an indexer"):
        Stage.of(config, number=1, count=3)
