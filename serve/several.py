"""The models of a server with several: which one a request names, and what a loaded one becomes for routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from llmjax.adapter_settings import modules_of
from llmjax.config_file import ServedModel
from llmjax.errors import EngineDead
from llmjax.serve.context import Server, unknown_model
from llmjax.serve.models import Entry, State

if TYPE_CHECKING:
    from llmjax.several.pool import Engine, ModelPool, PooledModel

MakeServer = Callable[..., Server]


class SeveralModels:
    """The models of a pool; the `Models` of a server with several.

    Args:
        models: their settings, in order; the mapping that the pool's ``begin`` reads, for models join and leave.
        pool: loads and unloads them.
        make: makes a `Server` of a loaded engine, of the settings of its server, and of its names.
    """

    def __init__(self, models: dict[str, ServedModel], pool: ModelPool, make: MakeServer) -> None:
        self._models = models
        self._pool = pool
        self._make = make
        self._servers: dict[str, Server] = {}  # of the engines that were there last
        self._by_name = {name: model for model in models.values() for name in names_of(model)}
        self._any = next((model for model in models.values() if model.engine.any_name), None)
        self._created = int(time.time())
        self._changing = asyncio.Lock()  # models join and leave one at a time

    @property
    def entries(self) -> Sequence[Entry]:
        return [self._entry(model) for model in self._models.values()]

    @property
    def pool(self) -> ModelPool:
        return self._pool

    def find(self, name: str | None) -> Entry:
        return self._entry(self._find(name))

    def _find(self, name: str | None) -> ServedModel:
        if not name and self._models:
            return next(iter(self._models.values()))
        name = name or ""
        found = self._by_name.get(name) or self._model_of_adapter(name) or self._any
        if found is None:
            raise unknown_model(name, list(self._models), pulls=True)
        return found

    def _model_of_adapter(self, name: str) -> ServedModel | None:
        """The model that has an adapter of that name: one that is or was loaded, or one of its settings."""
        for model in self._models.values():
            server = self._servers.get(model.name)
            if server is not None and server.engine.adapters.named(name) is not None:
                return model
            if any(module.name == name for module in modules_of(model.engine.lora_modules)):
                return model
        return None

    @asynccontextmanager
    async def using(self, name: str, *, keep_alive: float | None = None) -> AsyncIterator[Server]:
        """A model that stays until the block ends; arguments and errors are those of `ModelPool.using`.

        Args:
            name: the first of its names.
        """
        if (model := self._models.get(name)) is None:  # it has been deleted meanwhile
            raise unknown_model(name, list(self._models), pulls=True)
        async with self._pool.using(name, keep_alive=keep_alive) as engine:
            yield self._server_of(model, engine)

    def _server_of(self, model: ServedModel, engine: Engine) -> Server:
        """The server of a model's engine, which is made when it is first asked for."""
        server = self._servers.get(model.name)
        if server is None or server.engine is not engine:
            server = self._servers[model.name] = self._make(
                engine,
                model.server,
                names=frozenset(names_of(model)),
                any_name=model.engine.any_name,
                holding=partial(self._pool.holding, model.name),
                created=self._created,
            )
        return server

    def is_there(self, name: str) -> bool:
        """Whether ``using`` it waits for nothing."""
        return self._pool.is_there(name)

    async def unload(self, name: str) -> bool:
        if self._pool.models[name].manners.pinned:
            return False
        await self._pool.unload(name)
        return True

    def has(self, name: str) -> bool:
        """Whether a model, and no adapter, is called that."""
        return name in self._by_name

    async def join(self, model: ServedModel) -> None:
        """Has one more model, or another one in place of that of its name, whose requests end first."""
        from llmjax.several.serving import manners_of  # it is there: the pool is

        async with self._changing:
            before = self._models.get(model.name)
            if before is not None and before.engine == model.engine:
                return
            await self._leave(model.name)
            self._models[model.name] = model
            self._by_name |= dict.fromkeys(names_of(model), model)
            self._pool.add(model.name, manners_of(model.settings))

    async def leave(self, name: str) -> None:
        """Takes a model out; new requests do not find it, and its engine ends when those that run have."""
        async with self._changing:
            await self._leave(name)

    async def _leave(self, name: str) -> None:
        if (model := self._models.pop(name, None)) is None:
            return
        self._by_name = {other: one for other, one in self._by_name.items() if one is not model}
        await self._pool.remove(name)
        self._servers.pop(name, None)

    def check_health(self) -> None:
        """Raises EngineDead where there are models, and all have failed."""
        failed = [model for model in self._pool.models.values() if model.phase == "failed"]
        if failed and len(failed) == len(self._pool.models):
            raise EngineDead(f"no model can be loaded; {failed[0].name}: {failed[0].failure}")

    async def wait_died(self) -> int:
        await asyncio.Event().wait()  # a model that fails is tried again
        raise AssertionError

    async def shutdown(self) -> None:
        await self._pool.shutdown()

    def _entry(self, model: ServedModel) -> Entry:
        pooled = self._pool.models[model.name]
        engine = pooled.engine
        last = self._servers.get(model.name) if engine is None else self._server_of(model, engine)
        expires = None if pooled.expires is None else max(0.0, pooled.expires - asyncio.get_running_loop().time())
        return Entry(
            name=model.name,
            names=model.engine.served_names,
            config=model.engine,
            state=state_of(pooled),
            created=self._created,
            server=last if last is not None and last.engine is pooled.engine else None,
            last=last,
            expires=expires,
            failure=pooled.failure if pooled.phase == "failed" else "",
            pinned=pooled.manners.pinned,
        )


def names_of(model: ServedModel) -> tuple[str, ...]:
    """What clients may call a model: its names, and where it was given none, what the operator has named."""
    derived = model.engine.served_names == (model.name,) and model.name in model.engine.model
    return (*model.engine.served_names, *([model.engine.model] if derived else []))


def state_of(model: PooledModel) -> State:
    """What clients are told of a model."""
    if model.bringing is not None and model.phase != "leaving":
        return "loading"
    if model.phase == "leaving":
        return "sleeping" if model.after else "unloaded"
    if model.phase == "loaded" and model.engine is not None and model.engine.is_sleeping:
        return "sleeping"
    return model.phase
