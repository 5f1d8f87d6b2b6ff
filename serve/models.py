"""The models of a server, as routes that show all of them see them: one, or several."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from starlette.requests import Request

from llmjax.adapter_settings import AdapterModule, modules_of
from llmjax.config import EngineConfig
from llmjax.serve.context import Server
from llmjax.serve.errors import ApiError
from llmjax.serve.interfaces import Engine

State = Literal["unloaded", "loading", "loaded", "sleeping", "failed"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One of the models, as it is now.

    Args:
        name: the first of its names.
        names: those under which it is listed.
        config: its engine's settings.
        state: whether it is loaded.
        created: when it began to be served, in seconds since 1970.
        server: while it is loaded, or sleeps.
        last: the same, or what it was when it was loaded last, whose engine has ended; None: it has not been yet.
        expires: seconds until it is unloaded if nobody asks for it; None: it stays.
        failure: why it is not loaded; empty: nothing has failed.
        pinned: whether it stays whoever needs memory; None: it is the only one.
    """

    name: str
    names: tuple[str, ...]
    config: EngineConfig
    state: State
    created: int
    server: Server | None = None
    last: Server | None = None
    expires: float | None = None
    failure: str = ""
    pinned: bool | None = None

    @property
    def adapters(self) -> list[AdapterModule]:
        """Adapters that requests may name as its models; of one that has not been loaded yet, those of its settings."""
        if self.last is None:
            return list(modules_of(self.config.lora_modules))
        return [
            AdapterModule(name=adapter.reference.name, path=adapter.reference.path, base=adapter.base)
            for adapter in self.last.engine.adapters.listed
        ]

    @property
    def listed(self) -> tuple[str, ...]:
        """Its names, and those of its adapters."""
        return (*self.names, *(adapter.name for adapter in self.adapters))

    def adapter(self, name: str | None) -> AdapterModule | None:
        """Its adapter of that name."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def shown_name(self, name: str | None) -> str:
        """What it is called where a request calls it ``name``."""
        found = self.adapter(name)
        return self.name if found is None else found.name


class Models(Protocol):
    """All models of a server; the first is meant where a request names none."""

    @property
    def entries(self) -> Sequence[Entry]: ...

    def find(self, name: str | None) -> Entry:
        """The model of that name, or the first one; raises ``ApiError`` (404) if there is none."""

    def using(self, name: str) -> AbstractAsyncContextManager[Server]:
        """A model that stays until the block ends; it is loaded if need be.

        Args:
            name: the first of its names.

        Raises:
            ModelUnavailable: it cannot be loaded, or not in time.
        """

    async def unload(self, name: str) -> bool:
        """Unloads a model once its requests have ended, unless it is to stay; whether it does."""

    def check_health(self) -> None:
        """Raises EngineDead if nothing can be answered."""

    async def wait_died(self) -> int:
        """Returns the exit status once the server cannot go on."""

    async def shutdown(self) -> None:
        """Ends the engines; what they still do is aborted."""


class OneModel:
    """The model of a server with one; it is there for as long as the server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def _engine(self) -> Engine:
        return self._server.engine

    @property
    def entries(self) -> Sequence[Entry]:
        name = self._engine.info.model_name
        return [
            Entry(
                name=name,
                names=self._engine.config.served_names or (name,),
                config=self._engine.config,
                state="sleeping" if self._engine.is_sleeping else "loaded",
                created=self._server.created,
                server=self._server,
                last=self._server,
            )
        ]

    def find(self, name: str | None) -> Entry:
        self._server.check_model(name)
        return self.entries[0]

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Server]:
        yield self._server

    async def unload(self, name: str) -> bool:
        return False

    def check_health(self) -> None:
        self._engine.check_health()

    async def wait_died(self) -> int:
        return await self._engine.wait_died()

    async def shutdown(self) -> None:
        await self._engine.shutdown(drain_timeout=0)


def models_of(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


def loaded(entry: Entry) -> Server:
    """A model that is loaded; raises ``ApiError`` (409) if it is not, for what concerns engines that run."""
    if entry.server is None:
        raise ApiError(
            f"the model {entry.name} is not loaded; a request for it loads it",
            status=409,
            param="model",
            code="model_not_loaded",
        )
    return entry.server
