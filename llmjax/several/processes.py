"""How the models of a pool are loaded: each by a process of its own, which asks before it takes memory."""

from __future__ import annotations

import asyncio

from llmjax.async_llm import AsyncLLM
from llmjax.config import EngineConfig
from llmjax.engine.clients.process import ProcessEngine
from llmjax.engine.need import Need
from llmjax.machine_share import MachineShare


class ProcessLoading:
    """A model that is being loaded; the `Loading` of a pool.

    Args:
        config: the engine's configuration.
        name: what log lines call it.
        memory: bytes of the machine's memory for all models.
    """

    def __init__(self, config: EngineConfig, *, name: str, memory: int) -> None:
        self._config = config
        self._process = ProcessEngine(config, MachineShare(host_memory=memory), name=name, asks=True)
        self._making: asyncio.Task[AsyncLLM] | None = None

    async def measured(self) -> Need:
        return await asyncio.wrap_future(self._process.measured)

    def proceed(self) -> None:
        self._process.proceed()

    async def loaded(self) -> AsyncLLM:
        self._making = asyncio.create_task(asyncio.to_thread(AsyncLLM.from_config, self._config, self._process))
        engine = await self._making
        await engine.wait_ready()
        return engine

    def stop(self) -> None:
        self._process.kill()

    async def ended(self) -> None:
        if self._making is not None:  # its thread ends with the process
            await asyncio.gather(self._making, return_exceptions=True)
        await asyncio.to_thread(self._process.close)
