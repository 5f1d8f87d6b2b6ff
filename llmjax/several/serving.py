"""The pool of a server's models, as their settings say."""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmjax.config import ModelSettings
from llmjax.config_file import ServedModel
from llmjax.host_memory import free_memory
from llmjax.several.pool import Manners, ModelPool
from llmjax.several.processes import ProcessLoading

ON_DEMAND = 300.0  # seconds that a model stays which nobody has wanted from the start, as with Ollama


def pool_of(models: Mapping[str, ServedModel], *, memory: int | None, patience: float) -> ModelPool:
    """A pool that loads the models as processes.

    Args:
        models: by name; those that join the pool later are looked for here, too.
        memory: bytes of the machine's memory for all of them; None: what is free now.
        patience: seconds that a request waits for a model.
    """
    budget = free_memory() if memory is None else memory

    def begin(name: str) -> ProcessLoading:
        return ProcessLoading(models[name].engine, name=name, memory=budget)

    manners = {model.name: manners_of(model.settings) for model in models.values()}
    return ModelPool(manners, begin, memory=budget, patience=patience)


def manners_of(settings: ModelSettings) -> Manners:
    """How a model with these settings is treated."""
    at_start = settings.load == "start"
    default = math.inf if at_start else ON_DEMAND
    keep_alive = default if settings.keep_alive is None else settings.keep_alive
    return Manners(load_at_start=at_start, keep_alive=keep_alive, pinned=settings.pinned)
