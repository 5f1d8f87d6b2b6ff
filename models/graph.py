"""A model without weights, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from llmjax.models.config import ModelConfig


@dataclass(frozen=True)
class ModelGraph:
    """A model without weights: static, hashable, to be closed over by a jitted function."""

    config: ModelConfig
    dtype: jnp.dtype  # of weight matrices
    activation_dtype: jnp.dtype  # of everything between layers
    names: tuple[str, ...]  # of its parameters
    axes: tuple[tuple[str | None, ...], ...]  # logical names of each parameter's axes
    plain: frozenset[str] = frozenset()  # names of those that must be arrays, however files store them

    @cached_property
    def without_layers(self) -> ModelGraph:
        """The model of the parameters that no layer has: enough for ``CausalLM.logits``."""
        kept = [i for i, name in enumerate(self.names) if not name.startswith(("model.layers.", "model.altup."))]
        names = tuple(self.names[i] for i in kept)
        return replace(
            self,
            config=replace(self.config, layers=()),
            names=names,
            axes=tuple(self.axes[i] for i in kept),
            plain=self.plain & frozenset(names),
        )
