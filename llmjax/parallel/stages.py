"""Divides a model's layers among processes for pipeline parallelism.

Each stage has consecutive layers and gets the hidden states of a step from the stage before it. The first stage embeds
the tokens, and the last one has the head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from llmjax.errors import ConfigError
from llmjax.models import ModelConfig

LAYER = re.compile(r"(?<=^model\.layers\.)\d+")


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a model.

    Attributes:
        layers: numbers of the layers.
        config: config of the stage as a model, whose layers count from 0.
    """

    layers: range
    config: ModelConfig

    @classmethod
    def of(cls, config: ModelConfig, *, number: int, count: int) -> Stage:
        """Stage ``number``, from 0, of the ``count`` stages of a model.

        Raises:
            ConfigError: the model cannot be divided into this number of stages.
        """
        said = f"pipeline_parallel_size {count}"
        if count > config.num_layers:
            raise ConfigError(f"{said}: the model has {config.num_layers} layers, and each stage needs one")
        if count > 1 and (config.per_layer is not None or config.altup is not None):
            raise ConfigError(f"{said}: a model with embeddings for each layer cannot be divided yet")
        layers = layers_of(config.num_layers, number=number, count=count)
        own = [config.layers[layer] for layer in layers]
        if any(layer.state_of is not None and layer.state_of not in layers for layer in own):
            raise ConfigError(f"{said}: layers of one stage share keys with those of another; take fewer stages")
        if own[0].chosen_before:
            raise ConfigError(f"{said}: layers of one stage share an indexer with those of another; take fewer stages")
        last = number == count - 1
        return cls(
            layers,
            replace(
                config,
                layers=tuple(
                    layer if layer.state_of is None else replace(layer, state_of=layer.state_of - layers.start)
                    for layer in own
                ),
                pooler=config.pooler if last else None,
                embeds=number == 0,
                first_layer=layers.start,
                has_head=last,
            ),
        )

    def stored(self, name: str) -> str:
        """The name in the whole model of a parameter of this stage."""
        return LAYER.sub(lambda found: str(int(found[0]) + self.layers.start), name)


def layers_of(num_layers: int, *, number: int, count: int) -> range:
    """The layers of a stage: equal numbers, or one more in stages before the last, which has the head.

    This is the order of vLLM's ``get_pp_indices`` (vllm/distributed/utils.py): layers that are left over go to the
    stages before the last one, backward to the first.
    """
    each, more = divmod(num_layers, count)
    sizes = [each + (count - 1 - more <= stage < count - 1) for stage in range(count)]
    start = sum(sizes[:number])
    return range(start, start + sizes[number])
