"""Sleep: the weights leave the devices, and come back when the engine is woken."""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from llmjax.config import EngineConfig
from llmjax.engine.loading.model import LoadedModel, load_model
from llmjax.errors import CheckpointError
from llmjax.host_memory import give_back
from llmjax.jax_settings import use_compilation_cache
from llmjax.platforms import Platform

logger = logging.getLogger(__name__)

Parts = dict[jax.Device, npt.NDArray[Any]]


class Sleeper:
    """Puts the weights of a rank away and takes them back. Nothing may be computed meanwhile.

    Args:
        config: the configuration with which the model was loaded, and is loaded again.
        model: the model whose weights are put away.
    """

    def __init__(self, config: EngineConfig, *, platform: Platform, model: LoadedModel) -> None:
        self._config = config
        self._platform = platform
        self._model = model
        self._discarded = False
        self._on_host: list[Parts] | None = None  # the weights' leaves

    @property
    def asleep(self) -> bool:
        """Whether the weights have left the devices."""
        return self._discarded or self._on_host is not None

    @property
    def _weights(self) -> list[dict[str, Any]]:
        """The weights of the model, and those of its encoder of images."""
        encoder = self._model.encoder
        return [self._model.params] if encoder is None else [self._model.params, encoder.params]

    def sleep(self, *, discard: bool) -> None:
        """Frees the devices' memory of the weights; ``discard`` as `Sleep` has it."""
        leaves = [] if self._discarded else jax.tree.leaves(self._weights)
        if discard:
            self._on_host, self._discarded = None, True
        elif self._platform.is_cpu or self._discarded or self._on_host is not None:
            leaves = []
        else:
            self._on_host = [_parts(leaf) for leaf in leaves]
        for leaf in leaves:
            leaf.delete()
        gc.collect()  # JAX then frees arrays that are host memory or mapped files on a CPU
        give_back()

    def wake(self) -> None:
        """Brings the weights back.

        Raises:
            CheckpointError: their files have changed or gone.
        """
        weights, started = self._weights, time.monotonic()
        if self._discarded:
            cache = use_compilation_cache(self._config.compilation_cache_dir)
            # Places for adapters are made elsewhere.
            loaded = load_model(self._config, self._platform, cache_dir=cache, progress=False, places=False)
            if loaded.digest != self._model.digest:
                raise CheckpointError(f"{self._model.path} holds another model than before: start the program again")
            self._model.params.update(loaded.params)
            if self._model.encoder is not None and loaded.encoder is not None:
                self._model.encoder.params.update(loaded.encoder.params)
        elif self._on_host is not None:
            leaves, tree = jax.tree.flatten(weights)
            back = [_joined(parts, leaf) for parts, leaf in zip(self._on_host, leaves, strict=True)]
            for params, own in zip(weights, jax.block_until_ready(jax.tree.unflatten(tree, back)), strict=True):
                params.update(own)
        else:
            return
        self._on_host, self._discarded = None, False
        logger.info("the weights are back after %.1f s", time.monotonic() - started)


def _parts(leaf: jax.Array) -> Parts:
    """The parts of an array that this process's devices have, on the host."""
    return {shard.device: np.asarray(shard.data) for shard in leaf.addressable_shards}


def _joined(parts: Parts, leaf: jax.Array) -> jax.Array:
    """An array as ``leaf`` was, of such parts."""
    kind = leaf.sharding.memory_kind
    arrays = [jax.device_put(part, SingleDeviceSharding(device, memory_kind=kind)) for device, part in parts.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)
