"""An engine with its model, which the core does not know: describes the engine, profiles it, and puts it to sleep."""

from __future__ import annotations

from typing import Any

from llmjax.config import EngineConfig
from llmjax.engine.core.engine import Engine
from llmjax.engine.core.request import EngineRequest
from llmjax.engine.device.commands import Sleep, WakeState, WakeWeights
from llmjax.engine.device.runner import Runner
from llmjax.engine.loading.memory import KVPlan
from llmjax.engine.loading.model import LoadedModel
from llmjax.engine.profiler import Profiler
from llmjax.engine.programs.compilations import CompileCounter
from llmjax.errors import Asleep, InvalidRequest
from llmjax.platforms import Platform


class LoadedEngine(Engine):
    """The engine of a model.

    Args:
        config: the configuration that was asked for.
        platform: the device.
        model: the model, with its weights loaded.
        kv_plan: shape of the KV cache.
        runner: the device side.
        compilations: counts what XLA compiles from now on.
        core: other arguments of `Engine`.
    """

    runner: Runner

    def __init__(
        self,
        *,
        config: EngineConfig,
        platform: Platform,
        model: LoadedModel,
        kv_plan: KVPlan,
        runner: Runner,
        compilations: CompileCounter,
        **core: Any,
    ) -> None:
        super().__init__(
            runner=runner,
            vocab_size=model.config.vocab_size,
            seed=config.seed,
            rewinds=not config.is_staged,
            compilations=lambda: compilations.count,
            **core,
        )
        self.config = config
        self.platform = platform
        self.model = model
        self.kv_plan = kv_plan
        self.compilations = compilations
        self.profiler = Profiler(config.profile_dir)
        self._closed_last = (self.kv, self.profiler)

    def add(self, request: EngineRequest) -> None:
        """Queues a request; see `Engine.add` for arguments and errors. Raises Asleep while the engine sleeps."""
        if self.runner.executor.asleep:
            raise Asleep
        super().add(request)

    def sleep(self, *, discard: bool) -> None:
        """Frees the device's memory until the engine is woken; there may be no requests then. A second time it may free
        more.

        Args:
            discard: the weights are loaded again from their files; otherwise they wait in the host's memory.

        Raises:
            InvalidRequest: requests have not ended.
        """
        if self.num_requests:
            raise InvalidRequest(f"{self.num_requests} requests have not ended: the engine cannot sleep")
        while not self.idle:
            self.step()
        self.reset_prefix_cache(offloaded=False)
        if self.scheduler.adapters is not None:
            self.scheduler.adapters.forget()
        self.runner.apply(Sleep(discard))

    def wake_weights(self) -> None:
        """Brings the weights back; raises CheckpointError if their files have changed."""
        self.runner.apply(WakeWeights())

    def wake_kv_cache(self) -> None:
        """Makes the KV cache again; requests can be computed once the weights are there, too."""
        self.runner.apply(WakeState())

    def close(self, *, wait: bool = True, lost: bool = False) -> None:
        """Waits for the device and stops the compiler threads.

        Args:
            wait: for the compilations that have begun, too.
            lost: the device waits for a process that has gone, and is not waited for.
        """
        try:
            if not lost:
                self.wait()
                self.keep()
        finally:
            for part in self._closed_last:
                part.close()
            self.runner.close(wait=wait)
            self.compilations.close()
