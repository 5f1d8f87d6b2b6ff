"""A server with several models in a thread of this process; their engines are threads of it, too, which load fast."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from llmjax import AsyncLLM
from llmjax.config import EngineConfig, ModelSettings, ServerConfig
from llmjax.config_file import Configs, ServedModel
from llmjax.engine.need import Need
from llmjax.serve.app import create_app_of_several
from llmjax.serve.listen import bind
from llmjax.serve.pulls import Pulls, pulled_before
from llmjax.serve.server import DrainingServer
from llmjax.serve.several import state_of
from llmjax.several.pool import ModelPool
from llmjax.several.serving import manners_of

EACH = 100  # what each model needs, and there is this for two of them
BOTH = 2 * EACH


class ThreadLoading:
    """Loads a model into this process.

    Args:
        gate: set once it may be loaded.
    """

    def __init__(self, config: EngineConfig, gate: threading.Event) -> None:
        self._config = config
        self._gate = gate
        self._engine: AsyncLLM | None = None

    async def measured(self) -> Need:
        return Need(weight_bytes=EACH - 10, kv_bytes=10, other_bytes=0)

    def proceed(self) -> None: ...

    async def loaded(self) -> AsyncLLM:
        def load() -> AsyncLLM:
            self._gate.wait()
            return AsyncLLM.from_config(self._config)

        self._engine = await asyncio.to_thread(load)
        await self._engine.wait_ready()
        return self._engine

    def stop(self) -> None: ...

    async def ended(self) -> None:
        if self._engine is not None:
            await self._engine.shutdown()


@dataclass(frozen=True)
class Several:
    """A running server.

    Args:
        gates: by model; one that is cleared keeps the model from being loaded.
    """

    url: str
    pool: ModelPool
    pulls: Pulls
    gates: dict[str, threading.Event]
    loop: asyncio.AbstractEventLoop

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=None, **options)  # type: ignore[arg-type]

    def states(self) -> dict[str, str]:
        return {name: state_of(model) for name, model in self.pool.models.items()}


def served(name: str, config: EngineConfig, server: ServerConfig, **settings: object) -> ServedModel:
    """One of the models."""
    own = config.replace(served_model_name=name, engine_process="thread")
    return ServedModel(name, own, server, ModelSettings(**settings))  # type: ignore[arg-type]


def start_several(
    models: Sequence[ServedModel], config: ServerConfig, *, memory: int = BOTH, common: EngineConfig | None = None
) -> tuple[Several, Callable[[], None]]:
    """A running server, and the function that stops it.

    Args:
        common: settings of the engines of models that are pulled; None: those of the first model.
    """
    found: list[Several] = []
    up = threading.Event()
    servers: list[DrainingServer] = []
    gates = {model.name: threading.Event() for model in models}
    opened = threading.Event()
    for gate in (opened, *gates.values()):
        gate.set()

    async def main() -> None:
        configs = Configs(common or models[0].engine, config, tuple(models))
        known = {model.name: model for model in [*models, *pulled_before(configs)]}

        def begin(name: str) -> ThreadLoading:
            return ThreadLoading(known[name].engine.replace(engine_process="thread"), gates.get(name, opened))

        manners = {model.name: manners_of(model.settings) for model in known.values()}
        pool = ModelPool(manners, begin, memory=memory, patience=config.model_timeout)
        sock = bind(config)
        app = create_app_of_several(known, pool, configs)
        server = DrainingServer(app, config, sock=sock)
        await pool.start()
        servers.append(server)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        found.append(Several(url, pool, app.state.pulls, gates, asyncio.get_running_loop()))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        up.set()
        await serving
        await server.stop_engine()

    runner = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    runner.start()
    up.wait()

    def stop() -> None:
        for gate in gates.values():
            gate.set()
        servers[0].should_exit = True
        runner.join()

    return found[0], stop
