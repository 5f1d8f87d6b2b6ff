"""A model without weights, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from llmjax.models.config import ModelConfig


@dataclass(frozen=True)
class ModelGraph:
    """A model without weights: static and hashable, so that a jitted function can close over it."""

    config: ModelConfig
    dtype: jnp.dtype  # dtype of weight matrices
    activation_dtype: jnp.dtype  # dtype of everything between layers
    names: tuple[str, ...]  # names of the parameters
    axes: tuple[tuple[str | None, ...], ...]  # logical names of each parameter's axes
    plain: frozenset[str] = frozenset()  # names of parameters that must be arrays, even if files store them quantized

    @cached_property
    def without_layers(self) -> ModelGraph:
        """The model without its layers: enough for ``CausalLM.logits``."""
        kept = [i for i, name in enumerate(self.names) if not name.startswith(("model.layers.", "model.altup."))]
        names = tuple(self.names[i] for i in kept)
        return replace(
            self,
            config=replace(self.config, layers=()),
            names=names,
            axes=tuple(self.axes[i] for i in kept),
            plain=self.plain & frozenset(names),
        )
