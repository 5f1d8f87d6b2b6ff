"""Sleep: an engine's weights and state leave its device, and come back when the engine is woken."""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from llmjax.config import EngineConfig
from llmjax.engine.device.executor import Executor
from llmjax.engine.loading.model import LoadedModel, load_model
from llmjax.errors import CheckpointError
from llmjax.host_memory import give_back
from llmjax.jax_settings import use_compilation_cache
from llmjax.platforms import Platform

logger = logging.getLogger(__name__)


class Sleeper:
    """Puts weights and state away and takes them back. Nothing may be computed meanwhile.

    Args:
        config: the configuration with which the model was loaded, and is loaded again.
        model: the model whose weights are put away.
        executor: uses the weights.
    """

    def __init__(self, config: EngineConfig, *, platform: Platform, model: LoadedModel, executor: Executor) -> None:
        self._config = config
        self._platform = platform
        self._model = model
        self._executor = executor
        self._state_gone = False
        self._discarded = False
        self._on_host: list[npt.NDArray[Any]] | None = None  # the weights' leaves

    @property
    def asleep(self) -> bool:
        """Whether the engine sleeps, so that nothing can be computed."""
        return self._state_gone or self._discarded or self._on_host is not None

    @property
    def _weights(self) -> list[dict[str, Any]]:
        """The weights of the model, and those of its encoder of images."""
        encoder = self._model.encoder
        return [self._model.params] if encoder is None else [self._model.params, encoder.params]

    def sleep(self, *, discard: bool) -> None:
        """Frees the KV cache and all other state on the device, and the device's memory of the weights.

        Args:
            discard: whether the weights leave the host's memory too, and are loaded from their files again. Otherwise
                they wait there; on a CPU they are there already, and stay as they are.
        """
        if not self._state_gone:
            self._executor.free_state()
            self._state_gone = True
        leaves = [] if self._discarded else jax.tree.leaves(self._weights)
        if discard:
            self._on_host, self._discarded = None, True
        elif self._platform.is_cpu or self._discarded or self._on_host is not None:
            leaves = []
        else:
            self._on_host = [np.asarray(leaf) for leaf in leaves]
        for leaf in leaves:
            leaf.delete()
        gc.collect()  # JAX then frees arrays that are host memory or mapped files on a CPU
        give_back()

    def wake_weights(self) -> None:
        """Brings the weights back.

        Raises:
            CheckpointError: their files have changed or gone.
        """
        weights, started = self._weights, time.monotonic()
        if self._discarded:
            cache = use_compilation_cache(self._config.compilation_cache_dir)
            found = load_model(self._config, self._platform, cache_dir=cache, progress=False)
            if found.digest != self._model.digest:
                raise CheckpointError(f"{self._model.path} holds another model than before: start the program again")
            self._model.params.update(found.params)
            if self._model.encoder is not None and found.encoder is not None:
                self._model.encoder.params.update(found.encoder.params)
        elif self._on_host is not None:
            leaves, tree = jax.tree.flatten(weights)
            back = [jax.device_put(stored, leaf.sharding) for stored, leaf in zip(self._on_host, leaves, strict=True)]
            for params, own in zip(weights, jax.block_until_ready(jax.tree.unflatten(tree, back)), strict=True):
                params.update(own)
        else:
            return
        self._on_host, self._discarded = None, False
        self._executor.take_weights()
        logger.info("the weights are back after %.1f s", time.monotonic() - started)

    def wake_state(self) -> None:
        """Makes a new state without KV entries."""
        if self._state_gone:
            self._executor.new_state()
            self._state_gone = False
