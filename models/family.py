"""The declaration of a model family: which config.json it reads, and what its checkpoints call their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.names import Names


@dataclass(frozen=True, eq=False)
class Family:
    """Architectures whose config.json one function reads in the same way.

    Attributes:
        read: makes a model from the keys; raises UnsupportedModel if one is wrong or not supported.
        defaults: what a missing key means.
        architectures: what a config.json has in ``architectures``, each with its ending (``ForCausalLM``).
        named: the architecture that models are named after when they are read; None: the first of ``architectures``.
        model_types: what a config.json without ``architectures`` has in ``model_type``.
        aliases: other names of keys, see ``Fields``.
        names: the checkpoints' names of tensors, or a function from the config.json to them; None: they are the
            model's own names.
        unit_head_vocabulary: size of the vocabulary of models whose head's rows must be scaled to length one.
        rewards_by_one_matrix: the head of a reward model is one matrix without a bias, not two as Qwen's.
    """

    read: Callable[[Fields], ModelConfig]
    defaults: Mapping[str, Any]
    architectures: tuple[str, ...]
    named: str | None = None
    model_types: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Names | Callable[[Mapping[str, Any]], Names] | None = None
    unit_head_vocabulary: int | None = None
    rewards_by_one_matrix: bool = False

    def fields(self, config: Mapping[str, Any], *, max_model_len: int | None = None) -> Fields:
        """The keys of a config.json with what missing ones mean; arguments as for ``model_config``."""
        return Fields(config, self.defaults, aliases=self.aliases, max_model_len=max_model_len)

    def tensor_names(self, config: Mapping[str, Any]) -> Names | None:
        """The names of tensors in the checkpoint of a config.json; None: they are the model's own."""
        return self.names(config) if callable(self.names) else self.names
